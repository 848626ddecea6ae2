"""Faults of the step of two-view methods, line by line."""

from faults import fault


def _step(name):
    return f"test_two_view.py::test_a_step_is_the_equations[{name}]"


def _tasks(name):
    return f"test_two_view.py::test_three_tasks_are_the_equations[{name}]"


FAULTS = [
    *fault.of(
        "methods/two_view/step.py",
        "test_two_view.py::test_one_row_has_none_to_be_compared_with",
        (
            "two_view: one row trains with a loss of 0",
            "if parts.batch_size == 1 and not (spec.momentum or spec.predictor):",
            "if False:",
        ),
        (
            "two_view: bases that compare with no row are refused one",
            "if parts.batch_size == 1 and not (spec.momentum or spec.predictor):",
            "if parts.batch_size == 1:",
        ),
    ),
    *fault.of(
        "methods/two_view/step.py",
        "test_two_view.py::test_other_than_two_views_are_refused",
        (
            "two_view: any number of views is trained on",
            'core.check_views(views, 2, "two_view")',
            'core.check_views(views, views.shape[1], "two_view")',
        ),
    ),
    *fault.of(
        "methods/two_view/strategies.py",
        _step("mocov2plus-lump"),
        (
            "two_view: lump does not mix",
            "return jnp.where(exists, blend, views), share",
            "return views, share",
        ),
        (
            "two_view: lump mixes with partners that do not exist",
            "return jnp.where(exists, blend, views), share",
            "return blend, share",
        ),
    ),
    *fault.of(
        "methods/two_view/head.py",
        "test_online_head.py"
        "::test_the_released_head_moves_the_statistics_with_rows_of_all_classes",
        (
            "two_view: the released head leaks nothing",
            "own = own.replace(stats=own.stats | moved)",
            "own = own.replace(stats=own.stats)",
        ),
        (
            "two_view: the released head has no LARS",
            'rates, scale = parts.curve(lr), {"scale": _scaled}',
            "rates, scale = parts.curve(lr), {}",
        ),
        (
            "two_view: the released head reads the parameters after the step",
            "encoder(before.params, own.stats",
            "encoder(own.params, own.stats",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/two_view/bases.py",
        "test_bases.py::test_a_distance_that_rules_the_loss_is_warned_about",
        (
            "two_view: a lambda of 1000 is not warned of",
            "elif options.negative_weight > options.weight:",
            "elif options.negative_weight > 1e9:",
        ),
    ),
    *fault.of(
        "methods/two_view/step.py",
        _step("dino-pnr"),
        (
            "two_view: dino's centre follows the network that learns",
            "jnp.mean(core.l2_normalize(features.k), axis=(0, 1))",
            "jnp.mean(core.l2_normalize(features.f), axis=(0, 1))",
        ),
        (
            "two_view: dino's centre is of prototypes as long as they are",
            "unit = core.l2_normalize(features.slow_prototypes)",
            "unit = features.slow_prototypes",
        ),
        (
            "two_view: dino's temperature never arrives",
            "done = jnp.where(state.task > 0, 1.0, jnp.minimum(done, 1.0))",
            "done = jnp.minimum(done, 1.0)",
            _tasks("dino-pnr"),
        ),
        (
            "two_view: dino's prototypes stay in every task",
            "held = (state.task == 0) & (core.progress",
            "held = (state.task >= 0) & (core.progress",
            _tasks("dino-pnr"),
        ),
        (
            "two_view: dino's prototypes never stay",
            "held = (state.task == 0) & (core.progress",
            "held = (state.task < 0) & (core.progress",
            _tasks("dino-pnr"),
        ),
        (
            "two_view: lejepa has the same slices at every step",
            "key = jax.random.fold_in(core.step_key(state), _SLICES)",
            "key = jax.random.fold_in(state.key, _SLICES)",
            _step("lejepa-pnr"),
        ),
        slow=True,
    ),
    *fault.of(
        "methods/two_view/networks.py",
        _step("mocov2plus-pnr"),
        (
            "two_view: both networks normalise both views at once",
            "beside(*passing, groups=2, key=key)",
            "beside(*passing, groups=1, key=key)",
        ),
        (
            "two_view: keys are of the network that learns",
            "two(of_slow[0][0]), of_slow[0][1]",
            "two(rows), of_slow[0][1]",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/two_view/networks.py",
        _step("dino-less_forget-local"),
        (
            "two_view: local crops keep no statistics",
            "near, after = near.reshape(-1, count, setup.dim), after | moved",
            "near = near.reshape(-1, count, setup.dim)",
        ),
        (
            "two_view: local crops share their moments",
            "params, after, crops, train=True, groups=count, key=own",
            "params, after, crops, train=True, groups=1, key=own",
        ),
        (
            "two_view: the teacher has the prototypes of the network that learns",
            'names = (*setup.copied.nets, "prototypes")',
            "names = setup.copied.nets",
            _step("dino-pnr"),
        ),
        slow=True,
    ),
    *fault.of(
        "methods/two_view/bases.py",
        "test_bases.py::test_local_crops_are_further_views",
        (
            "two_view: a base forgets the local crops",
            "return jnp.concatenate([features.z, features.local], axis=1)",
            "return features.z",
        ),
        (
            "two_view: dino is always centred",
            'if options.balance == "sinkhorn":',
            'if options.balance == "none":',
        ),
    ),
    *fault.of(
        "methods/two_view/step.py",
        _step("mocov2plus-pnr"),
        (
            "two_view: the slow network never moves",
            "slow = optim.ema(extra.momentum, networks.copied(setup, params), decay)",
            "slow = extra.momentum",
        ),
        (
            "two_view: the slow network follows the parameters before the step",
            "    state = core.apply_gradients(state, grads, setup.parts.tx, lr)\n"
            "    extra = _moved(setup, extra, state.params, features, first, progress)",
            "    begun = state.params\n"
            "    state = core.apply_gradients(state, grads, setup.parts.tx, lr)\n"
            "    extra = _moved(setup, extra, begun, features, first, progress)",
        ),
        (
            "two_view: the momentum follows the progress of the run",
            "first, progress = networks.unguided(setup, state), core.progress(state)",
            "first = networks.unguided(setup, state)\n"
            "    progress = state.step / state.task_steps",
        ),
        (
            "two_view: the slow network keeps no statistics",
            "extra._replace(momentum_stats=slow_stats)",
            "extra._replace(momentum_stats=extra.momentum_stats)",
        ),
        (
            "two_view: keys go to the bank of the other view",
            "extra.key_queue, extra.key_pointer, _banks(features.k)\n",
            "extra.key_queue, extra.key_pointer, _banks(features.k)[::-1]\n",
        ),
        (
            "two_view: queues hold raw rows",
            "return core.l2_normalize(embeddings).swapaxes(0, 1)",
            "return embeddings.swapaxes(0, 1)",
        ),
        (
            "two_view: the frozen queue is filled with keys",
            "extra.frozen_queue, extra.frozen_pointer, _banks(features.f),",
            "extra.frozen_queue, extra.frozen_pointer, _banks(features.k),",
        ),
        (
            "two_view: the frozen queue is filled in the first task",
            "_banks(features.f), active=~first",
            "_banks(features.f), active=True",
        ),
        (
            "two_view: the first task has the strategy's loss, later ones the base's",
            "jax.lax.cond(first, gradient_of(setup.base.loss), later, outputs)",
            "jax.lax.cond(~first, gradient_of(setup.base.loss), later, outputs)",
        ),
        (
            "two_view: the teacher is that of the first task for good",
            "or (task.index == 0 and not setup.parts.begun):",
            "or (task.index != 1 and not setup.parts.begun):",
            _tasks("mocov2plus-pnr"),
        ),
        (
            "two_view: the teacher has the slow network's statistics",
            "teacher_stats=core.copy(networks.copied(setup, state.stats)),",
            "teacher_stats=core.copy(\n            state.extra.momentum_stats\n"
            "            or networks.copied(setup, state.stats)\n        ),",
            _tasks("mocov2plus-pnr"),
        ),
        (
            "two_view: the optimiser goes on into the next task",
            "state = state.replace(opt_state=setup.parts.tx.init(state.params))",
            "state = state.replace(opt_state=state.opt_state)",
            _tasks("mocov2plus-pnr"),
        ),
        (
            "two_view: g is not born anew with the second task",
            "if setup.strategy.distiller and task.index == 1 and",
            "if setup.strategy.distiller and task.index == -1 and",
            _tasks("mocov2plus-pnr"),
        ),
        (
            "two_view: the step's statistics are dropped",
            "return state.replace(stats=stats, extra=extra), metrics",
            "return state.replace(extra=extra), metrics",
        ),
        (
            "two_view: ewc has no penalty",
            "return jax.tree.map(jnp.add, grads, penalty), extra",
            "return grads, extra",
            _tasks("mocov2plus-ewc"),
        ),
        (
            "two_view: ewc's penalty has the wrong sign",
            "return jax.tree.map(jnp.add, grads, penalty), extra",
            "return jax.tree.map(jnp.subtract, grads, penalty), extra",
            _tasks("mocov2plus-ewc"),
        ),
        (
            "two_view: ewc's penalty does not know the rate",
            "importance.gradient(estimate, state.params, weight=weight, lr=lr)",
            "importance.gradient(estimate, state.params, weight=weight)",
            _tasks("mocov2plus-ewc"),
        ),
        (
            "two_view: ewc sums gradients with the penalty",
            "importance.observe(estimate, grads, late)",
            "importance.observe(\n            estimate, "
            "jax.tree.map(jnp.add, grads, penalty), late\n        )",
            _tasks("mocov2plus-ewc"),
        ),
        (
            "two_view: ewc observes all but the beginning of a task",
            "(core.progress(state) >= 1 - setup.fisher_share)",
            "(core.progress(state) >= setup.fisher_share)",
            _step("mocov2plus-ewc"),
        ),
        (
            "two_view: ewc does not observe the last step of a short task",
            "last = state.step + 1 == state.task_start + state.task_steps",
            "last = state.step == state.task_start + state.task_steps",
            "test_importance.py"
            "::test_the_method_observes_late_steps_and_consolidates[0.01-1]",
        ),
        (
            "two_view: ewc does not consolidate",
            "penalty = jax.jit(importance.consolidate)(state.extra.importance, "
            "state.params)",
            "penalty = state.extra.importance",
            _tasks("mocov2plus-ewc"),
        ),
        (
            "two_view: der stores the projection of the other view",
            '"projection": outputs.z[:, 0]}',
            '"projection": outputs.z[:, 1]}',
            _step("mocov2plus-der"),
        ),
        (
            "two_view: der replays the other view",
            "replayed = others[:, 0]",
            "replayed = others[:, 1]",
            _step("mocov2plus-der"),
        ),
        (
            "two_view: der holds to rows that do not exist",
            'stored=items["projection"], stored_mask=mask)',
            'stored=items["projection"], stored_mask=None)',
            _step("mocov2plus-der"),
        ),
        (
            "two_view: the batch is stored before the memory is read",
            "        others, mask, items = _drawn(",
            '        early = {"image": batch["image"]}\n'
            '        early["projection"] = jnp.zeros((len(views), setup.dim))\n'
            "        extra = _stored(extra, k_write, early, after=())\n"
            "        others, mask, items = _drawn(",
            _step("mocov2plus-der"),
        ),
        (
            "two_view: both queues begin with the same rows",
            "frozen_queue=banks[1] if",
            "frozen_queue=banks[0] + 0.0 if",
            "test_two_view.py::test_a_fresh_state_holds_the_equations_start",
        ),
        (
            "two_view: lump's share has the key of the write",
            "strategies.mixed(k_mix, setup.mix, views, others, mask)",
            "strategies.mixed(k_write, setup.mix, views, others, mask)",
            "test_two_view.py::test_no_two_uses_share_a_key",
        ),
        (
            "two_view: nothing is stored",
            "extra = _stored(extra, k_write, offered, after=items)",
            "extra = extra",
            _step("mocov2plus-der"),
        ),
    ),
    *fault.of(
        "methods/two_view/networks.py",
        _step("mocov2plus-pnr"),
        (
            "two_view: g is given raw queries",
            "queries = setup.base.distiller_input(rows)",
            "queries = rows",
        ),
        (
            "two_view: g's statistics are dropped",
            "p, after = two(p), after | new",
            "p, after = two(p), after | {name: stats[name] for name in new}",
        ),
        (
            "two_view: g normalises both views at once",
            "setup.distiller(params, stats, queries, train=True, groups=2)",
            "setup.distiller(params, stats, queries, train=True, groups=1)",
        ),
        (
            "two_view: byol's predictor keeps no statistics",
            "o, after = two(o), after | new",
            "o, after = two(o), after | {name: stats[name] for name in new}",
            _step("byol-pnr"),
        ),
        (
            "two_view: blank rows of an empty memory move the statistics",
            "lambda a, b: jnp.where(some, a, b), new, after[name]",
            "lambda a, b: a, new, after[name]",
            _tasks("mocov2plus-der"),
        ),
        (
            "two_view: replayed rows move the statistics from before the step",
            "setup.copied(params, after, replayed, train=True, key=own)",
            "setup.copied(params, stats, replayed, train=True, key=own)",
            _step("mocov2plus-der"),
        ),
        (
            "two_view: blank images of an empty memory move the statistics",
            "some = jnp.any(stored)",
            "some = True",
            _tasks("mocov2plus-der"),
        ),
        (
            "two_view: the teacher is always in training mode",
            "train=setup.frozen_train,",
            "train=True,",
        ),
        (
            "two_view: the teacher is never in training mode",
            "train=setup.frozen_train,",
            "train=False,",
            _step("byol-cassle-batch"),
        ),
        (
            "two_view: the teacher is asked in the first task alone",
            "jax.lax.cond(unguided(setup, state), lambda: absent, features)",
            "jax.lax.cond(~unguided(setup, state), lambda: absent, features)",
        ),
    ),
]
