"""Faults of the methods' steps, but for that of two_view."""

from faults import fault

_BASE = "test_bases.py::test_a_base_is_its_equations"
_STREAM = "test_online_ssl.py::test_a_stream_is_the_equations"

FAULTS = [
    *fault.of(
        "methods/online_ssl/regularisers.py",
        f"{_STREAM}[simsiam-cassle]",
        (
            "ssl: pseudo-negatives come on top of the base's loss of all rows",
            "base.pnr(rows, options) - base.loss(rows, options)",
            "base.pnr(rows, options)",
            f"{_STREAM}[mocov2plus-pnr]",
        ),
    ),
    *fault.of(
        "methods/online_ssl/stored.py",
        f"{_STREAM}[simsiam-cassle]",
        (
            "ssl: stored projections never move",
            'changes["projection"] = moved',
            'changes["projection"] = items["projection"]',
            f"{_STREAM}[simsiam-cla_r]",
        ),
        (
            "ssl: stored projections move by the other share",
            "mean, setup.stored_momentum)",
            "mean, 1 - setup.stored_momentum)",
            f"{_STREAM}[simsiam-cla_r]",
        ),
        (
            "ssl: features of replayed rows stay as they came",
            'if "feature" in items:',
            'if "used" in items and "feature" in items:',
            f"{_STREAM}[simclr-duel]",
        ),
        (
            "ssl: a draw does not count as a use",
            'changes["used"] = jnp.ones_like(items["used"])',
            'changes["used"] = items["used"]',
            f"{_STREAM}[simsiam-cla_r]",
        ),
        (
            "ssl: rows that were not replayed move, too",
            "slots = jnp.where(active, slots, memory.capacity)  #",
            "slots = slots + 0  #",
            f"{_STREAM}[simsiam-cla_r]",
        ),
        (
            "ssl: a feature is that of one view",
            "core.l2_normalize(jnp.sum(z, axis=1))",
            "core.l2_normalize(z[:, 0])",
            f"{_STREAM}[simsiam-cla_r]",
        ),
        (
            "ssl: policies that read labels pass",
            'return not {"label", "task"} & set(policy.reads)',
            "return True",
            "test_online_ssl.py::test_memories_are_refused_by_name",
        ),
    ),
    *fault.of(
        "methods/online_ssl/step.py",
        "test_online_ssl.py"
        "::test_a_queue_keeps_the_newest_rows_where_draws_and_batches_differ",
        (
            "ssl: a queue's batches are taken for those of one size",
            "aligned=size in (0, rows.shape[1] - size)",
            "aligned=True",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/online_ssl/step.py",
        f"{_STREAM}[simsiam-cassle]",
        (
            "ssl: rows are replayed as soon as the memory has as many",
            "jnp.sum(extra.memory.filled) > size",
            "jnp.sum(extra.memory.filled) >= size",
            "test_online_ssl.py"
            "::test_nothing_is_replayed_while_the_memory_holds_no_more_than_a_draw",
        ),
        (
            "ssl: blank images stand in for replayed rows",
            "jnp.where(active, replayed, repeated)",
            "replayed",
        ),
        (
            "ssl: rows that stand in are counted",
            "gradient(0), gradient(setup.beside), outputs)",
            "gradient(0), gradient(0), outputs)",
        ),
        (
            "ssl: incoming rows are aligned, too",
            "rows if setup.every_row else rows[: 2 * setup.beside]",
            "rows",
        ),
        (
            "ssl: the teacher moves as fast as the network",
            "state.replace(extra=extra), setup.teacher_ema)",
            "state.replace(extra=extra), 1 - setup.teacher_ema)",
        ),
        (
            "ssl: the teacher never moves",
            "return extra._replace(teacher=teacher, teacher_stats=stats)",
            "return extra",
        ),
        (
            "ssl: the weight is left out",
            "(options.weight if setup.plan.weighs else 1) * align",
            "align",
        ),
        (
            "ssl: all updates see the same views",
            "batch, key)\n    if setup.size:",
            "batch, keys[0])\n    if setup.size:",
            "test_online_ssl.py::test_no_two_views_share_a_key",
        ),
        (
            "ssl: the step counts updates",
            "_update(setup, state.replace(step=step), batch, key)",
            "_update(setup, state, batch, key)",
        ),
        (
            "ssl: a snapshot is taken before each batch",
            "due = state.step % setup.snapshot_every == 0",
            "due = state.step >= 0",
            f"{_STREAM}[vicreg-cassle]",
        ),
        (
            "ssl: a teacher with averaged statistics normalises by the batch",
            "setup.copied(extra.teacher, extra.teacher_stats, images, train=False)",
            "setup.copied(extra.teacher, extra.teacher_stats, images, train=True)",
            f"{_STREAM}[simclr-cassle]",
        ),
        (
            "ssl: queues take rows that stand in",
            "bank, pointer, rows[:, :size], active=active)",
            "bank, pointer, rows[:, :size])",
            f"{_STREAM}[mocov2plus-pnr]",
        ),
        (
            "ssl: the slow network does not follow",
            "extra = extra._replace(momentum=slow)",
            "extra = extra._replace(momentum=extra.momentum)",
            f"{_STREAM}[byol-cassle]",
        ),
    ),
    *fault.of(
        "methods/online_ssl/regularisers.py",
        f"{_STREAM}[byol-der]",
        (
            "ssl: der compares one view",
            "return (first + second) / 2",
            "return first",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/online_ssl/stored.py",
        f"{_STREAM}[byol-der]",
        (
            "ssl: what der stores moves",
            "if setup.plan.moves:",
            "if setup.plan.stores:",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/online_ssl/step.py",
        f"{_STREAM}[simclr-lump]",
        (
            "ssl: lump mixes before the memory holds enough",
            "jnp.broadcast_to(active, size)",
            "jnp.ones(size, bool)",
        ),
        (
            "ssl: lump's memory may hold rows that are never mixed",
            "if 0 < parts.batch_size < replay.size:",
            "if 0 < parts.batch_size < replay.size - 1:",
            "test_online_ssl.py::test_memories_that_lump_cannot_mix_with_are_refused",
        ),
        slow=True,
    ),
    *[
        *fault.of(
            "methods/online/network.py",
            "test_online.py"
            "::test_together_is_a_pass_each_and_none_replayed_leaves_statistics",
            (
                "network: a pass without rows moves the statistics",
                "lambda new, old: jnp.where(some, new, old), after, before",
                "lambda new, old: new, after, before",
            ),
        ),
        *fault.of(
            "nets/chain.py",
            "test_online.py"
            "::test_together_is_a_pass_each_and_none_replayed_leaves_statistics[2-gpu]",
            (
                "network: batches that pass at once are mixed up",
                "return [outputs[:, i] for i in range(count)]",
                "return [outputs[:, -1 - i] for i in range(count)]",
            ),
            (
                "network: batches that pass at once share their statistics",
                "groups=count,",
                "groups=1,",
            ),
            (
                "network: batches never pass at once",
                "return not sharding.on_cpu() and len(batches) > 1 and alike",
                "return sharding.on_cpu() and len(batches) > 1 and not alike",
            ),
            (
                "network: a teacher that is asked of all at once is in training mode",
                "_taking_turns(batches), train=False)",
                "_taking_turns(batches), train=True)",
                "test_online.py"
                "::test_answers_are_those_of_each_part_by_itself[gpu-False]",
            ),
        ),
        *fault.of(
            "methods/online/probe.py",
            "test_online_probe.py"
            "::test_gradients_are_along_the_sphere_and_of_past_tasks_alone",
            (
                "probe: rows of the present task count as past",
                "jnp.arange(self.num_tasks) < state.task, grads",
                "jnp.arange(self.num_tasks) <= state.task, grads",
            ),
            (
                "probe: the gradient along the features counts too",
                "across = slope - jnp.sum(slope * unit, axis=1, keepdims=True) * unit",
                "across = slope",
            ),
        ),
    ],
    *[
        *fault.of(
            "methods/online/step.py",
            "test_online.py::test_er_replays_what_it_may[past_tasks]",
            (
                "step: past tasks are also the present one",
                'state.extra.memory.items["task"] < state.task',
                'state.extra.memory.items["task"] <= state.task',
            ),
            (
                "step: classes that come are not seen",
                'state.extra.seen.at[batch["label"]].set(True)',
                "state.extra.seen | False",
                "test_online.py::test_er_ace_masks_each_part_by_itself[paper]",
            ),
            (
                "step: every update on a batch counts as a step",
                "state.replace(step=step), incoming",
                "state, incoming",
                "test_online.py::test_updates_descend_again_on_the_same_batch",
            ),
            (
                "step: rows that fill a draw are blank",
                "rows = jnp.arange(len(mask)) % count",
                "rows = jnp.arange(len(mask))",
                "test_online.py::test_draws_repeat_rows_that_exist_and_take_allowed_ones",
            ),
            (
                "step: unseen classes are predicted",
                "jnp.where(state.extra.seen, logits, -jnp.inf) if self.limit else",
                "logits if self.limit else",
                "test_online.py::test_er_ace_masks_each_part_by_itself[paper]",
            ),
            (
                "step: rows are stored with the task before",
                "jnp.broadcast_to(state.task, label.shape)",
                "jnp.broadcast_to(state.task - 1, label.shape)",
                "test_online.py::test_a_batch_is_written_after_its_updates",
            ),
        ),
        *fault.of(
            "methods/online/step.py",
            "test_online.py::test_er_replays_what_it_may",
            (
                "step: er replays classes of the batch, not the others",
                "return ~(label[:, None] == incoming.label).any(axis=1)",
                "return (label[:, None] == incoming.label).any(axis=1)",
            ),
        ),
        *fault.of(
            "methods/er_ace.py",
            "test_online.py::test_er_ace_masks_each_part_by_itself[paper]",
            (
                "step: er_ace swaps incoming and replayed rows",
                "new.logits,\n                incoming.label,\n"
                "                old.logits,\n                replayed.label,",
                "old.logits,\n                replayed.label,\n"
                "                new.logits,\n                incoming.label,",
            ),
        ),
        *fault.of(
            "methods/er_aml.py",
            "test_online.py::test_picks_are_uniform_over_what_is_allowed",
            (
                "step: er_aml picks the anchor for its positive",
                "same & exists & (jnp.arange(capacity + count) != own[:, None])",
                "same & exists",
            ),
            (
                "step: er_aml leaves gamma out",
                "return gamma * losses.triplet(",
                "return losses.triplet(",
                "test_online.py"
                "::test_er_aml_pulls_pairs_and_replays_all_classes_seen[paper]",
            ),
            (
                "step: er_aml's replayed rows pass before its pairs",
                "pairs, stats = net.replay(params, alone, picked_rows)\n"
                "            old, stats = net.replay(params, stats, replayed)",
                "old, stats = net.replay(params, alone, replayed)\n"
                "            pairs, stats = net.replay(params, stats, picked_rows)",
                "test_online.py"
                "::test_er_aml_pulls_pairs_and_replays_all_classes_seen[paper]",
            ),
            (
                "step: er_aml's first task in code form reads the memory's statistics",
                "(plain, alone),",
                "(plain, stats),",
                "test_online.py::test_er_aml_code_learns_the_first_task_plainly",
            ),
        ),
        *fault.of(
            "methods/online_ssl/step.py",
            "test_online_ssl.py::test_drift_is_measured_and_training_stays_the_same",
            (
                "online_ssl: drift is not measured",
                "return probe.add(method, parts) if parts.replay.measure else method",
                "return method",
            ),
        ),
        *fault.of(
            "methods/er_lwf.py",
            "test_er_lwf.py::test_a_step_is_one_mean_over_all_rows[paper]",
            (
                "step: er_lwf holds the classes of the present task",
                "task_of < state.task if paper",
                "task_of <= state.task if paper",
            ),
            (
                "step: er_lwf's teacher normalises by its batch",
                "rows, train=not paper)",
                "rows, train=True)",
            ),
            (
                "step: er_lwf's released form holds the first task's classes",
                "else task_of > 0",
                "else task_of >= 0",
                "test_er_lwf.py::test_a_step_is_one_mean_over_all_rows[code]",
            ),
            (
                "step: er_lwf distils at temperature 2 always",
                "temperature=temperature,",
                "temperature=2.0,",
            ),
            (
                "step: er_lwf lets classes compete that were not met",
                "class_mask=extra.seen, example_mask",
                "class_mask=None, example_mask",
                "test_er_lwf.py::test_the_first_task_is_replay_among_what_was_met",
            ),
        ),
        *fault.of(
            "methods/mir.py",
            "test_mir.py::test_a_step_equals_its_twin[past]",
            (
                "step: mir replays what the step helps",
                "return later - before, scored",
                "return before - later, scored",
            ),
            (
                "step: mir's virtual step has rate 1",
                "ahead = jax.tree.map(lambda p, g: p - lr * g, params, grads)",
                "ahead = jax.tree.map(lambda p, g: p - g, params, grads)",
                "test_mir.py::test_a_step_equals_its_twin",
            ),
        ),
        *fault.of(
            "methods/gem.py",
            "test_gem.py::test_projection_by_hand",
            (
                "step: gem projects where all constraints are violated",
                "violated = jnp.any(along < 0)",
                "violated = jnp.all(along < 0)",
            ),
            (
                "step: gem leaves its margin out of the dual",
                "along + margin * jnp.sum(matrix, axis=1)",
                "along",
            ),
            (
                "step: gem is held by the present task, too",
                '(memory.items["task"] == task) & online.past_tasks(state)',
                '(memory.items["task"] == task)',
                "test_gem.py::test_gem_s_step",
            ),
        ),
        *fault.of(
            "methods/agem.py",
            "test_gem.py::test_agem_projection",
            (
                "step: agem projects gradients that agree",
                'jnp.minimum(jnp.vdot(gradient, unit, precision="highest"), 0.0)',
                'jnp.maximum(jnp.vdot(gradient, unit, precision="highest"), 0.0)',
            ),
        ),
        *fault.of(
            "methods/online/teacher.py",
            "test_icarl.py"
            "::test_the_teacher_is_the_network_at_the_begin_of_the_task_and_stays",
            (
                "step: icarl's teacher is that of the first task for good",
                "if task.index == 0:",
                "if task.index != 1:",
            ),
            (
                "step: icarl's teacher is in training mode",
                "train: bool = False",
                "train: bool = True",
                "test_icarl.py::test_paper_has_the_teacher_for_old_classes_of_every_row",
            ),
        ),
        *fault.of(
            "methods/icarl.py",
            "test_icarl.py"
            "::test_the_teacher_is_the_network_at_the_begin_of_the_task_and_stays",
            (
                "step: icarl's old classes stay none",
                "old = core.copy(state.extra.seen)",
                "old = core.copy(state.extra.old)",
            ),
        ),
        *fault.of(
            "methods/online/means.py",
            "test_icarl.py::test_the_nearest_mean_wins",
            (
                "step: empty slots count in the class means",
                "exists = filled[slots] & (number < capacity)",
                "exists = number < capacity",
            ),
            (
                "step: rows of the last chunk count twice in the class means",
                "exists = filled[slots] & (number < capacity)",
                "exists = filled[slots]",
            ),
        ),
        *fault.of(
            "methods/der.py",
            "test_der.py::test_a_step_is_the_equation",
            (
                "step: der leaves alpha out",
                "value += alpha * losses.der(",
                "value += losses.der(",
            ),
            (
                "step: der stores what it says of replayed rows",
                "return value, (stats, new.logits)",
                "return value, (stats, old.logits)",
            ),
        ),
        *fault.of(
            "methods/cclis.py",
            "test_cclis.py::test_a_later_step_is_the_equation[default]",
            (
                "step: cclis does not bring prototypes back to the sphere",
                'core.l2_normalize(params["prototypes"])',
                'params["prototypes"]',
                "test_cclis.py"
                "::test_prototypes_are_moved_on_the_sphere_whatever_their_length",
            ),
            (
                "step: cclis trains prototypes at the network's rate",
                'shares = {"prototypes": settings.prototype_rate}',
                "shares = {}",
            ),
            (
                "step: cclis has its teacher in training mode",
                "rehearsal.teach(net, read, images, train=False)",
                "rehearsal.teach(net, read, images, train=True)",
            ),
        ),
        *fault.of(
            "methods/co2l.py",
            "test_co2l.py::test_a_later_step_is_the_equation[default]",
            (
                "step: co2l has stored rows for anchors",
                "anchor_mask=state.extra.current[label]",
                "anchor_mask=None",
            ),
            (
                "step: co2l distils in the first task",
                "return jnp.where(state.task > 0, weight * value, 0)",
                "return weight * value",
                "test_co2l.py::test_the_first_task_is_contrast_alone",
            ),
        ),
        *fault.of(
            "methods/rehearsal.py",
            "test_rehearsal.py::test_three_tasks[co2l-12]",
            (
                "step: stored rows weigh like those of the task",
                "return jnp.where(jnp.any(same, axis=1), stored, fresh)",
                "return fresh",
                "test_rehearsal.py::test_weights_of_stored_rows_and_of_others",
            ),
            (
                "step: the teacher of cclis and co2l stays that of the first task",
                "if task.index > 0:",
                "if task.index == 1:",
            ),
            (
                "step: cclis and co2l forget the classes that their teacher has met",
                "taught=core.copy(state.extra.seen),",
                "taught=core.copy(state.extra.taught),",
            ),
            (
                "step: the end of a task counts one task too few",
                "extra.current, size, state.task + 1",
                "extra.current, size, state.task",
            ),
            (
                "step: a task's end forgets what was stored",
                "np.concatenate([stored, task.train.rows]).astype(np.int32)",
                "np.concatenate([0 * stored - 1, task.train.rows]).astype(np.int32)",
            ),
            (
                "step: a class of two tasks is old in the second",
                "return self.taught & ~self.current",
                "return self.taught",
                "test_rehearsal.py"
                "::test_a_class_of_both_the_memory_and_the_task_is_one_pool",
            ),
        ),
        *fault.of(
            "methods/duel/active_memory.py",
            "test_duel.py::test_rows_that_are_not_finite_never_enter",
            (
                "duel: rows of nan enter the memory",
                "mask = jnp.isfinite(features).all(axis=1)\n    features",
                "mask = jnp.ones(len(features), bool)\n    features",
            ),
            (
                "duel: a drawn row becomes nan",
                "jnp.where(exists & finite, slots",
                "jnp.where(exists, slots",
                "test_duel.py::test_features_that_are_not_finite_renew_no_row",
            ),
        ),
        *fault.of(
            "methods/duel/active_memory.py",
            "test_duel.py::test_of_crops_already_cut_one_is_kept_and_used_as_it_is",
            (
                "duel: an image of the memory has an axis of views",
                "image if image.ndim == 4 else image[:, 0]",
                "image if image.ndim == 4 else image[:, :1]",
            ),
            slow=True,
        ),
        *fault.of(
            "methods/duel/step.py",
            "test_duel.py::test_of_crops_already_cut_one_is_kept_and_used_as_it_is",
            (
                "step: duel crops its stored crops anew",
                "images = jnp.stack([images, images], axis=1)",
                "images = jnp.asarray(images)",
            ),
            slow=True,
        ),
        *fault.of(
            "methods/duel/step.py",
            "test_duel.py::test_a_step_is_the_equation[moco]",
            (
                "step: duel's keys are of the queries' view",
                "(*slow, views[:, 1])",
                "(*slow, views[:, 0])",
            ),
            (
                "step: duel's kernel cannot be turned off",
                "        kernel=kernel,\n",
                "        kernel=True,\n",
                "test_duel.py::test_the_kernel_of_accelerators_can_be_turned_off",
            ),
            (
                "step: duel's slow network never moves",
                "slow = optim.ema(extra.momentum, state.params, setup.momentum)",
                "slow = extra.momentum",
            ),
            (
                "step: duel's slow network keeps no statistics",
                "extra = state.extra._replace(momentum_stats=slow_stats)",
                "extra = state.extra",
            ),
            (
                "step: duel's simclr has each row for its own positive",
                "pairs[:, ::-1].reshape(z.shape)",
                "pairs.reshape(z.shape)",
                "test_duel.py::test_a_step_is_the_equation[simclr]",
            ),
        ),
        *fault.of(
            "methods/icl/steps.py",
            "test_icl.py::test_old_and_new_anchors_take_turns",
            (
                "step: icl sees old rows in the first epoch alone",
                "turn = done % extra.epoch_steps < extra.old_steps",
                "turn = done < extra.old_steps",
            ),
            (
                "step: icl's outer gradient is at the weights before the inner steps",
                "jax.value_and_grad(outer, has_aux=True)(there)",
                "jax.value_and_grad(outer, has_aux=True)(state.params)",
                "test_icl.py::test_a_meta_step_is_the_equation[3-False-False]",
            ),
            (
                "step: icl's inner steps move the weights by no share of them",
                "return optax.tree.norm(difference) / optax.tree.norm(before)",
                "return optax.tree.norm(difference)",
                "test_icl.py::test_a_meta_step_is_the_equation[3-False-False]",
            ),
            (
                "step: icl's last inner action has no reward",
                "agent = ddpg.observe(agent, k_reward, value, setup.agent)",
                "agent = agent._replace(pending=jnp.zeros((), bool))",
                "test_icl.py::test_both_agents_set_rates_of_plain_sgd",
            ),
            (
                "step: icl rewards the last inner action at the weights before it",
                "there = jax.lax.stop_gradient((params, stats))",
                "there = state.params, stats",
                "test_icl.py::test_both_agents_set_rates_of_plain_sgd",
            ),
            (
                "step: icl rewards the last inner action by the first batch",
                "last_key, *sides = jax.tree.map(lambda x: x[-1], batches)",
                "last_key, *sides = jax.tree.map(lambda x: x[0], batches)",
                "test_icl.py::test_every_inner_action_has_its_reward[False-False]",
            ),
            (
                "step: icl's fixed rate leaves the outer step to the optimiser",
                "if setup.learnt_rate or setup.fixed_lr is not None:",
                "if setup.learnt_rate:",
                "test_icl.py::test_a_fixed_rate_is_that_of_plain_sgd[True-None]",
            ),
            (
                "step: icl's fixed rate is not that of the inner steps",
                "for fixed in (setup.inner_lr, setup.fixed_lr):",
                "for fixed in (setup.inner_lr,):",
                "test_icl.py::test_a_fixed_rate_is_that_of_plain_sgd[True-None]",
            ),
        ),
        *fault.of(
            "nets/gin.py",
            "test_gin.py::test_equals_dense_matrices_in_float64[other-True]",
            (
                "step: gin counts a node itself as one neighbour",
                "x = (1.0 + self.eps) * x + gcn.neighbour_sum(x, graphs)",
                "x = x + gcn.neighbour_sum(x, graphs)",
            ),
            (
                "step: gin has a second ReLU behind its batch norm",
                "x = bn(x, mask, train=train)",
                "x = nn.relu(bn(x, mask, train=train))",
            ),
            (
                "step: gin reads out its last layer alone",
                "return jnp.concatenate(outputs, axis=-1)",
                "return jnp.concatenate(outputs[-1:] * self.layers, axis=-1)",
            ),
        ),
        *fault.of(
            "methods/icl/ddpg.py",
            "test_ddpg.py::test_rates_span_the_range_evenly_on_their_scale[linear]",
            (
                "step: icl's linear scale of rates begins at 0",
                "return options.low + (options.high - options.low) * action",
                "return options.high * action",
            ),
            (
                "step: icl's rates are on the log scale by default",
                'scale: Literal["linear", "log"] = "linear"',
                'scale: Literal["linear", "log"] = "log"',
                "test_ddpg.py::test_an_actor_that_has_learnt_nothing_takes_steps",
            ),
        ),
        *fault.of(
            "methods/icl/orders.py",
            "test_icl.py::test_inner_steps_are_those_of_the_paper",
            (
                "step: icl has an inner step more for half a row",
                "inner_steps((new + 0.5) / (old + new))",
                "inner_steps(new / (old + new))",
            ),
        ),
        *fault.of(
            "methods/icl/method.py",
            "test_icl.py::test_a_task_begins_with_its_weights[retrain]",
            (
                "step: icl's retraining begins from the present weights",
                'plan.strategy in ("retrain", "random")',
                'plan.strategy in ("random",)',
            ),
            (
                "step: icl's growth is none",
                "orders.growth(task) if task.index > 0 else 0.0",
                "orders.growth(task) if task.index < 0 else 0.0",
            ),
        ),
        *fault.of(
            "methods/icl/passes.py",
            "test_icl.py::test_old_and_new_anchors_take_turns",
            (
                "step: icl has a row's own positive among its negatives",
                "own = incremental.others(size) & mask",
                "own = jnp.ones((size, size), bool) & mask",
            ),
            (
                "step: icl judges the rows of its projector",
                "judged=not projector,",
                "judged=True,",
                "test_icl.py::test_graphcl_leaves_the_positive_out_and_the_projector"
                "_unjudged",
            ),
            (
                "step: icl always has the positive in the denominator",
                "with_positive=self.with_positive,",
                "with_positive=True,",
                "test_icl.py::test_graphcl_leaves_the_positive_out_and_the_projector"
                "_unjudged",
            ),
        ),
    ],
    *[
        *fault.of(
            "methods/two_view/bases.py",
            f"{_BASE}[mocov2plus-code]",
            (
                "step: moco swaps its key banks",
                "bank1, bank2 = features.key_queue",
                "bank2, bank1 = features.key_queue",
            ),
            (
                "step: moco swaps its keys",
                "(q1, q2), (k1, k2) = _views(features.z), _views(features.k)",
                "(q1, q2), (k2, k1) = _views(features.z), _views(features.k)",
            ),
            (
                "step: byol predicts the same view",
                "noncontrastive.byol(o1, k2) + noncontrastive.byol(o2, k1)",
                "noncontrastive.byol(o1, k1) + noncontrastive.byol(o2, k2)",
                f"{_BASE}[byol-code]",
            ),
            (
                "step: pnr adds its pseudo-negatives",
                "return total - options.negative_weight * apart",
                "return total + options.negative_weight * apart",
                f"{_BASE}[barlow_twins-code]",
            ),
            (
                "step: vicreg's lambda is cassle's weight",
                "negative_weight=23.0",
                "negative_weight=25.0",
                "test_bases.py::test_defaults_are_the_papers",
            ),
        ),
        *fault.of(
            "methods/two_view/strategies.py",
            "test_bases.py::test_a_strategy_is_its_equation[simclr]",
            (
                "step: cassle leaves its weight out",
                "+ options.weight * distilled",
                "+ distilled",
                f"{_BASE}[simclr-code]",
            ),
            (
                "step: der replays rows that do not exist",
                "example_mask=features.stored_mask",
                "example_mask=None",
            ),
        ),
    ],
]
