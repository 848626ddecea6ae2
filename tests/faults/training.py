"""Faults of optimisers, of the state that they move, and of batch norm."""

from faults import fault

FAULTS = [
    *fault.of(
        "optim.py",
        "test_optim.py::test_lars_follows_the_released_code",
        (
            "optim: lars clips at 1, whatever the rate",
            "jnp.minimum(ratio / lr, 1.0)",
            "jnp.minimum(ratio, 1.0)",
        ),
        (
            "optim: lars scales biases",
            "if exclude_1d and w.ndim <= 1:",
            "if exclude_1d and w.ndim < 1:",
        ),
        (
            "optim: weight decay acts on biases",
            "lambda p: p.ndim > 1, params",
            "lambda p: p.ndim > 0, params",
            "test_optim.py::test_sgd_is_torchs",
        ),
        (
            "optim: nesterov is ignored",
            "optax.trace(momentum, nesterov) if",
            "optax.trace(momentum) if",
            "test_optim.py::test_sgd_is_torchs",
        ),
        (
            "optim: adam's decay is decoupled where it is not to be",
            "((moments, decay) if decoupled else (decay, moments))",
            "((decay, moments) if decoupled else (moments, decay))",
            "test_optim.py::test_adam_and_adamw",
        ),
        (
            "optim: the warm-up ends an epoch late",
            "ramp = jnp.minimum(e / max(warmup_epochs - 1, 1), 1.0)",
            "ramp = jnp.minimum(e / max(warmup_epochs, 1), 1.0)",
            "test_optim.py::test_warmup_cosine_steps_once_an_epoch",
        ),
        (
            "optim: the cosine does not come to its end",
            "(e - warmup_epochs) / (epochs - warmup_epochs)",
            "(e - warmup_epochs) / epochs",
            "test_optim.py::test_warmup_cosine_steps_once_an_epoch",
        ),
        (
            "optim: three epochs are 2.9999998",
            "whole = jnp.floor(progress * epochs + epochs * 2.0**-22)",
            "whole = jnp.floor(progress * epochs)",
            "test_optim.py::test_warmup_cosine_steps_once_an_epoch",
        ),
        (
            "optim: milestones come an epoch late",
            "(e >= m).astype",
            "(e > m).astype",
            "test_optim.py::test_step_decay_and_constant",
        ),
        (
            "optim: a task has the schedule of the next",
            "rates[jnp.minimum(task, len(schedules) - 1)]",
            "rates[jnp.minimum(task + 1, len(schedules) - 1)]",
            "test_optim.py::test_tasks_have_schedules_of_their_own",
            "test_core.py::test_each_task_has_its_rates_and_later_ones_the_last",
        ),
        (
            "optim: the slow network is nearly the fast one",
            "(decay * o + (1.0 - decay) * n)",
            "(decay * n + (1.0 - decay) * o)",
            "test_optim.py::test_ema_of_trees",
        ),
        (
            "optim: the momentum falls over a task",
            "return end - (end - start) * (jnp.cos(jnp.pi * progress) + 1.0) / 2.0",
            "return start + (end - start) * (jnp.cos(jnp.pi * progress) + 1.0) / 2.0",
            "test_optim.py::test_momentum_schedule",
        ),
    ),
    *fault.of(
        "optim.py",
        "test_vit.py::test_shares_of_leaves",
        (
            "optim: a frozen leaf decays",
            "leaf for name, leaf in named.items() if share(name)}",
            "leaf for name, leaf in named.items()}",
        ),
        (
            "optim: a leaf's share is ignored",
            'return share(name) * own["/".join(name)]',
            'return own["/".join(name)]',
        ),
    ),
    *fault.of(
        "nets/convnext.py",
        "test_convnext.py::test_equals_the_definition_in_float64",
        (
            "convnext: gelu by tanh",
            "approximate=False",
            "approximate=True",
        ),
        (
            "convnext: the last map is normalised before it is averaged",
            "x = jnp.mean(x.astype(jnp.float32), axis=(1, 2))\n"
            '        return _norm(jnp.float32, "norm")(x)',
            'x = _norm(jnp.float32, "norm")(x.astype(jnp.float32))\n'
            "        return jnp.mean(x, axis=(1, 2))",
        ),
        (
            "convnext: the strength of a channel is its mean square",
            "jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)",
            "square",
        ),
        (
            "convnext: what windows do not fill is read with the next row",
            "x = x.reshape(-1, rows, side, columns, side, channels).swapaxes(2, 3)",
            "x = x.reshape(-1, rows, side, columns, side, channels)",
        ),
        (
            "convnext: a row that keeps its branch is not weighed up",
            "(len(x), 1, 1, 1)) / keep",
            "(len(x), 1, 1, 1))",
            "test_convnext.py::test_branches_are_dropped_by_row_and_weighed_up",
        ),
        (
            "convnext: a blank channel has no gradient",
            "jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)",
            "jnp.sqrt(square)",
            "test_convnext.py::test_a_blank_channel_has_a_gradient",
        ),
    ),
    *fault.of(
        "nets/conv.py",
        "test_convnext.py::"
        "test_depthwise_and_its_gradients_are_those_of_the_definition",
        (
            "conv: tiles of a depthwise convolution begin one place too early",
            "around = _TILE + 2 * reach",
            "around = _TILE + 2 * reach - 1",
        ),
        (
            "conv: a depthwise convolution of one tile is turned",
            "np.arange(inputs) - np.arange(outputs)[:, None] + before",
            "np.arange(outputs)[:, None] - np.arange(inputs) + before",
        ),
    ),
    *fault.of(
        "nets/conv.py",
        "test_conv.py::test_pieces_are_as_large_as_the_cache_or_the_compiler_allows",
        (
            "conv: a piece of the weight gradient is larger than the cache",
            "_NUMBERS * count // max(x.size, out.size)",
            "_NUMBERS * count // out.size",
        ),
        (
            "conv: there are as many pieces as the cache asks for",
            "-(-count // _PIECES),",
            "1,",
        ),
        (
            "conv: pieces have few places",
            "_PLACES // places,",
            "1,",
        ),
    ),
    *fault.of(
        "nets/vit.py",
        "test_vit.py::test_equals_the_definition_in_float64",
        (
            "vit: gelu by tanh",
            "approximate=False",
            "approximate=True",
        ),
        (
            "vit: what is gated passes the gate's function, too",
            'gate * _dense(self.hidden, self.dtype, "up")(x)',
            'gate * nn.silu(_dense(self.hidden, self.dtype, "up")(x))',
        ),
        (
            "vit: registers are among the mean",
            "jnp.mean(x[:, skip:], axis=1)",
            "jnp.mean(x[:, 1:], axis=1)",
        ),
        (
            "vit: the epsilon of the norms is flax's",
            "nn.LayerNorm(epsilon, dtype",
            "nn.LayerNorm(1e-6, dtype",
        ),
        (
            "vit: a row that keeps its branch is not weighed up",
            "branch *= kept / keep",
            "branch *= kept",
            "test_vit.py::test_branches_are_dropped_by_row_and_weighed_up",
        ),
        (
            "vit: branches are dropped for the whole batch at once",
            "(len(x), 1, 1)",
            "(1, 1, 1)",
            "test_vit.py::test_branches_are_dropped_by_row_and_weighed_up",
        ),
        (
            "vit: the first block drops as many branches as the last",
            "drop=self.drop_path * number / max(self.layers - 1, 1)",
            "drop=self.drop_path",
            "test_vit.py::test_branches_are_dropped_by_row_and_weighed_up",
        ),
        (
            "vit: a frozen patch projection has a gradient",
            "kernel, bias = jax.lax.stop_gradient((kernel, bias))",
            "kernel, bias = (kernel, bias)",
            "test_vit.py::test_a_frozen_patch_projection_is_never_moved",
        ),
    ),
    *fault.of(
        "nets/positions.py",
        "test_vit.py::test_tables_are_resized_as_jax_image_does",
        (
            "vit: positions are resized with the other cubic kernel",
            "_cubic(place - column, -0.75)",
            "_cubic(place - column, -0.5)",
        ),
        (
            "vit: DINOv2's offset is left out",
            "size / (new + 0.1) if rule",
            "size / new if rule",
        ),
        (
            "vit: smaller tables are resized without antialiasing",
            "reach = max(step, 1.0)",
            "reach = 1.0",
        ),
        (
            "vit: pairs turn the other way",
            "rest * cos + turned * sin",
            "rest * cos - turned * sin",
            "test_vit.py::test_equals_the_definition_in_float64[rotary]",
        ),
        (
            "vit: rotations take columns for rows",
            'np.meshgrid(y, x, indexing="ij")',
            'np.meshgrid(y, x, indexing="xy")',
            "test_vit.py::test_equals_the_definition_in_float64[rotary]",
        ),
    ),
    *fault.of(
        "core.py",
        "test_core.py::test_progress_is_the_share_of_the_task_that_is_done",
        (
            "core: progress is that of the run",
            "return (state.step - state.task_start) / state.task_steps",
            "return state.step / state.task_steps",
        ),
        (
            "core: keys repeat in every task",
            "jax.random.fold_in(state.key, state.step)",
            "jax.random.fold_in(state.key, state.step - state.task_start)",
            "test_core.py::test_every_step_of_every_task_has_a_key_of_its_own",
        ),
        (
            "core: a share is ignored",
            "lambda d, share=share: share * d, direction[name]",
            "lambda d, share=share: d, direction[name]",
            "test_core.py::test_shares_scale_the_entries_that_they_name",
        ),
        (
            "core: a share is that of every entry",
            "direction = direction | {name: scaled}",
            "direction = jax.tree.map(lambda d: share * d, direction)",
            "test_core.py::test_shares_scale_the_entries_that_they_name",
        ),
        (
            "core: parameters go up the gradient",
            "lambda p, d: p - lr * d, state.params, direction",
            "lambda p, d: p + lr * d, state.params, direction",
            "test_core.py::test_shares_scale_the_entries_that_they_name",
        ),
        (
            "core: steps are not counted",
            "opt_state=opt_state, step=state.step + 1",
            "opt_state=opt_state, step=state.step",
            "test_core.py::test_shares_scale_the_entries_that_they_name",
        ),
        (
            "core: the state's numbers share a buffer",
            "task_start=zero + 0",
            "task_start=zero",
            "test_core.py::test_a_new_state_holds_no_array_twice",
        ),
        (
            "core: a copy is no copy",
            "jnp.array(x, copy=True)",
            "jnp.asarray(x)",
            "test_core.py::test_a_copy_has_buffers_of_its_own",
        ),
    ),
    *fault.of(
        "nets/chain.py",
        "test_queue.py",
        (
            "nets: embeddings are those of training mode",
            "inputs, train=False)[0]",
            "inputs, train=True)[0]",
            "test_queue.py::test_a_chain_embeds_with_its_encoder_and_projects_with_all",
            "test_two_view.py"
            "::test_evaluators_read_the_encoder_and_the_projector_in_evaluation_mode",
        ),
        (
            "nets: the projector's rows are taken for the encoder's",
            'return Chain({"encoder": self.nets["encoder"]}).project(state, inputs)',
            "return self.project(state, inputs)",
        ),
    ),
    *fault.of(
        "nets/initial.py",
        "test_nets.py::test_mlp_starts_as_pytorch_linear",
        (
            "nets: kernels start wider than PyTorch's",
            "variance_scaling(1 / 3,",
            "variance_scaling(1.0,",
        ),
        (
            "nets: biases start within 1 / fan in",
            "bound = fan_in**-0.5",
            "bound = 1 / fan_in",
        ),
    ),
    *fault.of(
        "schema.py",
        "test_schema.py",
        (
            "schema: a limit itself is refused",
            "self.least <= value",
            "self.least < value",
        ),
        (
            "schema: what is to be above may be equal",
            "self.above < value",
            "self.above <= value",
        ),
        (
            "schema: nan and infinity pass",
            "if plain is float and not abs(value) <= largest:",
            "if plain is float and abs(value) < 0:",
        ),
        ("schema: whole numbers pass int32", "int: 2**31 - 1,", "int: 2**63 - 1,"),
        ("schema: True is a number", "and not isinstance(value, bool)", "and True"),
        (
            "schema: entries of a list are not looked at",
            'check_value(value, kind, f"{field}[{number}]")',
            'check_value(value, Any, f"{field}[{number}]")',
        ),
        (
            "schema: calls from Python are not checked",
            "            check(function, options, field)\n            return function",
            "            return function",
        ),
        (
            "schema: None is always allowed",
            "and not (values[name] is None is option.default)",
            "and values[name] is not None",
        ),
        (
            "schema: entries may be there twice",
            "if self.once and _repeats",
            "if not self.once and _repeats",
        ),
    ),
    *fault.of(
        "nets/norm.py",
        "test_nets.py::test_batch_norm_equals_pytorch_passes_one_after_the_other",
        (
            "norm: running variances are biased",
            "batch_var = batch_var * (count / (count - 1))",
            "batch_var = batch_var * 1.0",
        ),
        (
            "norm: all views have the same statistics",
            "groups if train else 1)",
            "1)",
        ),
        (
            "norm: momentum is the new value's weight",
            "self.momentum * old + (1.0 - self.momentum) * new",
            "self.momentum * new + (1.0 - self.momentum) * old",
        ),
        (
            "norm: the last view alone moves the running mean",
            "away[0, view].reshape(near.shape) + near",
            "away[0, -1].reshape(near.shape) + near",
        ),
        (
            "norm: the second view's running mean is counted from the first's",
            "away[0, view].reshape(near.shape) + near",
            "away[0, view].reshape(near.shape) + means[-1]",
        ),
        (
            "norm: the statistics between the views are those after the next",
            'self.put_variable(BETWEEN, "mean", (*means[1:-1],))',
            'self.put_variable(BETWEEN, "mean", (*means[2:],))',
            "test_online.py"
            "::test_together_is_a_pass_each_and_none_replayed_leaves_statistics[2-gpu]",
        ),
        (
            "norm: a GPU sums what it squared",
            "for part in (rows, jnp.square(rows))",
            "for part in (rows, rows)",
            "test_nets.py::test_batch_norm_of_gpus_is_that_of_others_in_one_sum",
        ),
        (
            "norm: a GPU takes two sums as others do",
            'return sharding.platform() == "gpu"',
            'return sharding.platform() == "cuda"',
            "test_nets.py::test_batch_norm_of_gpus_is_that_of_others_in_one_sum",
        ),
        (
            "norm: on a GPU the slope of the scale is that of the bias",
            "[(s * views, s) for",
            "[(s, s) for",
            "test_nets.py::test_batch_norm_of_gpus_is_that_of_others_in_one_sum",
        ),
    ),
    *fault.of(
        "nets/norm.py",
        "test_nets.py::test_batch_norm_gradient_equals_finite_differences[gpu]",
        (
            "norm: a GPU moves rows by their mean alone that it scales by distances",
            "views, center = views - lax.optimization_barrier(near), away",
            "views, center = views, away",
        ),
        (
            "norm: on a GPU the variance's slope is that of the square",
            "2.0 * (distance - mean) * of_var",
            "2.0 * distance * of_var",
        ),
        (
            "norm: on a GPU the slope of the mean is not seen",
            "(of_mean + 2.0 * ",
            "(0.0 * of_mean + 2.0 * ",
        ),
        slow=True,
    ),
    *fault.of(
        "nets/chain.py",
        "test_cast.py::test_cast_kernels_give_the_same_outputs",
        (
            "chain: biases are cast, too",
            "wanted = casts and kernel and leaf.dtype",
            "wanted = casts and leaf.dtype",
        ),
        (
            "chain: kernels of nets that do not say so are cast",
            'getattr(net, "casts_kernels", False)',
            'getattr(net, "casts_kernels", True)',
        ),
        slow=True,
    ),
    *fault.of(
        "nets/chain.py",
        "test_cast.py::test_float32_is_not_carried_twice",
        (
            "chain: kernels that have the type already are carried beside the state",
            "casts and kernel and leaf.dtype != net.dtype",
            "casts and kernel",
        ),
    ),
    *fault.of(
        "nets/cast.py",
        "test_cast.py::test_kernels_of_networks_that_stay_are_taken_over",
        (
            "cast: those of the teacher are made in each step",
            "{name: before.extra[name] for name in still}",
            "{name: cast(getattr(state.extra, name)) for name in still}",
        ),
        (
            "cast: those of a network that moved are the old ones",
            "return Cast(cast(state.params), extra | taken, before.stats)",
            "return Cast(cast(state.params), extra | before.extra, before.stats)",
        ),
    ),
    *fault.of(
        "nets/cast.py",
        "test_cast.py::test_norms_of_a_teacher_are_put_into_its_kernels_once_a_call",
        (
            "cast: kernels with norms in them are read beside these norms",
            "for name, own in cast.stats.items()",
            "for name, own in {}.items()",
        ),
        (
            "cast: norms of a teacher are put into its kernels in each step",
            "{name: before.extra[name] for name in still}",
            "{name: of(getattr(state.extra, name)).folded(getattr(state.extra, name), "
            'getattr(state.extra, f"{name}_stats"))[0] for name in still}',
        ),
    ),
    *fault.of(
        "nets/norm.py",
        "test_cast.py::test_norms_in_kernels_give_the_same_outputs[conv_net]",
        (
            "norm: a folded norm's offset is not moved by the mean",
            'params.get("bias", 0.0) - stats["mean"] * factor}',
            'params.get("bias", 0.0)}',
        ),
        (
            "norm: a folded norm has no offset of its own",
            '{"offset": params.get("bias", 0.0) - ',
            '{"offset": -',
        ),
        (
            "norm: a folded norm does not scale the layer's bias",
            "{name: leaf * factor for name, leaf in layer.items()}",
            'dict(layer) | {"kernel": layer["kernel"] * factor}',
        ),
        (
            "norm: a folded norm has no factor of its own",
            'lax.rsqrt(stats["var"] + _EPSILON) * params.get("scale", 1.0)',
            'lax.rsqrt(stats["var"] + _EPSILON)',
        ),
        (
            "norm: a folded norm adds nothing",
            'return x + self.get_variable("batch_stats", "offset")',
            "return x",
        ),
        slow=True,
    ),
    *fault.of(
        "nets/chain.py",
        "test_cast.py::test_norms_in_kernels_give_the_same_outputs[basic]",
        (
            "chain: norms of blocks are not folded",
            'elif name in stats and "mean" not in stats[name]:',
            "elif False:",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/two_view/networks.py",
        "test_cast.py"
        "::test_a_teacher_that_normalises_by_the_batch_keeps_its_norms[two_view]",
        (
            "two_view: the teacher's norms are folded whatever it normalises by",
            "fold=not setup.frozen_train",
            "fold=True",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/rehearsal.py",
        "test_cast.py"
        "::test_a_teacher_that_normalises_by_the_batch_keeps_its_norms[co2l]",
        (
            "rehearsal: the teacher's norms are folded whatever it normalises by",
            "fold=not frozen_train",
            "fold=True",
        ),
        slow=True,
    ),
    *fault.of(
        "run/seeds.py",
        "test_cast.py::test_seeds_side_by_side_carry_kernels_of_their_own",
        (
            "seeds: kernels of all seeds are cast as if they were of one",
            "cast=method.cast and cast,",
            "cast=method.cast,",
        ),
        slow=True,
    ),
    *fault.of(
        "methods/two_view/step.py",
        "test_methods.py::test_a_step_by_cast_kernels_is_the_step[mocov2plus-pnr]",
        (
            "two_view: the teacher is read as it is saved",
            "f=networks.frozen_features(setup, read, images))",
            "f=networks.frozen_features(setup, state, images))",
        ),
        (
            "two_view: the slow network is read as it is saved",
            "slow=(read.extra.momentum, ",
            "slow=(extra.momentum, ",
        ),
        (
            "two_view: what moves is the network in bfloat16",
            "state = core.apply_gradients(state, grads, setup.parts.tx, lr)",
            "state = core.apply_gradients(read, grads, setup.parts.tx, lr)",
        ),
    ),
    *fault.of(
        "nets/conv.py",
        "test_conv.py::test_networks_in_groups_have_gradients_in_groups",
        (
            "conv: networks in groups have JAX's gradients",
            "if under_vmap.way() is None:",
            'if under_vmap.way() != "apart":',
        ),
        (
            "conv: groups of networks are of one",
            '"feature_group_count": groups * count',
            '"feature_group_count": groups',
        ),
    ),
    *fault.of(
        "nets/norm.py",
        "test_under_vmap.py::test_batch_norm_sums_over_the_channels_of_all_networks",
        (
            "norm: sums of several networks are as JAX has them",
            'if under_vmap.way() == "grouped":',
            "if False:",
        ),
    ),
    *fault.of(
        "nets/under_vmap.py",
        "test_under_vmap.py::test_the_channels_of_networks_follow_one_another",
        (
            "under_vmap: channels of networks are mixed",
            "x = jnp.moveaxis(x, 0, -2)",
            "x = jnp.moveaxis(x, 0, -1)",
        ),
        (
            "under_vmap: within a vmap networks are as JAX has them",
            "return in_channels(mapped)",
            "return functools.partial(mapped, 1)",
            "test_under_vmap.py"
            "::test_a_vmap_within_a_network_leaves_the_outer_one_its_way",
        ),
        (
            "under_vmap: results are parted by channels",
            "x.reshape(*x.shape[:-1], count, -1), -2, 0)",
            "x.reshape(*x.shape[:-1], -1, count), -1, 0)",
        ),
        (
            "under_vmap: what is in common is put in a row, too",
            "of_all, of_one, fits=all)",
            "of_all, of_one, fits=any)",
            "test_under_vmap.py::test_what_networks_have_in_common_is_not_put_in_a_row",
        ),
    ),
    *fault.of(
        "nets/under_vmap.py",
        "test_conv.py::test_networks_apart_have_a_convolution_each[case0-mapped0]",
        (
            "conv: networks apart are joined by groups",
            "fits=lambda are_mapped: are_mapped[of])",
            "fits=lambda are_mapped: False)",
        ),
        (
            "conv: all networks apart have the first one's kernel",
            "single(*(x[i] if is_mapped else x for x, is_mapped in pairs))",
            "single(*(x[0] if is_mapped else x for x, is_mapped in pairs))",
        ),
    ),
    *fault.of(
        "run/seeds.py",
        "test_seeds.py::test_all_ways_to_take_the_steps_of_seeds_agree",
        (
            "seeds: apart is not heard",
            "if apart or sharding.on_cpu():",
            "if sharding.on_cpu():",
        ),
        (
            "seeds: a CPU joins the convolutions of its seeds",
            "if apart or sharding.on_cpu():",
            "if apart:",
        ),
        (
            "seeds: a step that was traced for groups is taken again",
            "step = inspect.unwrap(step)",
            "step = step",
        ),
    ),
    *fault.of(
        "nets/lockstep.py",
        "test_lockstep.py::test_values_and_gradients_are_those_of_separate_passes[3]",
        (
            "lockstep: all networks are given what the first was",
            "*(values[x] for x in part.invars)",
            "*(values_of[0][x] for x in part.invars)",
        ),
        (
            "lockstep: what a later part reads is lost",
            "read_later |= set(read)",
            "read_later = set(read)",
        ),
        (
            "lockstep: what joined equations read is lost",
            "read_later |= {x for x in inputs if not _is_literal(x)}",
            "read_later |= set()",
        ),
        (
            "lockstep: each network sums by itself",
            "norm.moments_apart.__name__: norm.moments_together,",
            "",
            "test_lockstep.py::test_a_gpu_sums_once_for_all_networks[gpu]",
        ),
        (
            "lockstep: a shortcut is summed by itself",
            "joined[_name(equation), forms].append(equation)",
            "joined[id(equation), forms].append(equation)",
            "test_lockstep.py::test_a_shortcut_is_summed_with_what_it_is_added_to",
        ),
        (
            "lockstep: slopes of a shortcut are summed by themselves",
            "norm.affine_apart.__name__: norm.affine_together,",
            "",
            "test_lockstep.py::test_a_shortcut_is_summed_with_what_it_is_added_to",
        ),
        (
            "lockstep: networks of other forms are not refused",
            "if any(form != forms[0] for form in forms):",
            "if False:",
            "test_lockstep.py::test_networks_of_other_forms_are_refused",
        ),
    ),
    *fault.of(
        "nets/norm.py",
        "test_lockstep.py::test_values_and_gradients_are_those_of_separate_passes[2]",
        (
            "norm: of networks that pass together the first's moments are all's",
            "return tuple(map(_moments_of, distances, known))",
            "return tuple(_moments_of(rows, known[0]) for rows in distances)",
        ),
    ),
    *fault.of(
        "core.py",
        "test_methods.py::test_a_step_by_cast_kernels_is_the_step[cclis]",
        (
            "core: gradients of cast kernels stay in bfloat16",
            "g.astype(p.dtype), grads, params",
            "g, grads, params",
        ),
        (
            "core: a step does not go by the kernels that it is given",
            "at = state.params if at is None else at",
            "at = state.params",
        ),
        slow=True,
    ),
    *fault.of(
        "run/job.py",
        "test_cast.py::test_a_gpu_carries_cast_kernels_through_a_call[gpu]",
        (
            "job: kernels are cast in each step",
            'job.method.cast is not None and sharding.platform() == "gpu"',
            'job.method.cast is not None and sharding.platform() == "cuda"',
        ),
        slow=True,
    ),
    *fault.of(
        "run/job.py",
        "test_cast.py::test_a_call_by_cast_kernels_is_the_call",
        (
            "job: all steps of a call go by the kernels of its begin",
            "tuple(job.method.cast(state, x) for x in cast)",
            "cast",
        ),
        slow=True,
    ),
    *fault.of(
        "run/seeds.py",
        "test_seeds.py::test_an_axis_of_seeds_is_taken_off_again",
        (
            "seeds: the first seed's results are everyone's",
            "name: values[i] for name, values in named.items()",
            "name: values[0] for name, values in named.items()",
        ),
    ),
]
