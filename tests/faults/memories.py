"""Faults of the memories, of queues and of what consolidates."""

from faults import fault

FAULTS = [
    *fault.of(
        "memory/policies.py",
        "test_memory.py::test_reservoir_against_one_row_at_a_time",
        (
            "memory: the reservoir draws below n, not up to n",
            "(key, number, number + 1)",
            "(key, number, jnp.maximum(number, 1))",
            "test_memory.py::test_reservoir_draws_exactly_from_long_streams[10000]",
        ),
        (
            "memory: fifo keeps the first rows of a batch that is too large",
            "newer = jnp.sum(mask, dtype=jnp.int32) - jnp.cumsum",
            "newer = jnp.cumsum",
            "test_memory.py::test_fifo_against_a_queue",
        ),
        (
            "memory: a ring begins each batch where the last began",
            "return slots, (turn + added) % size",
            "return slots, turn",
            "test_policies.py::test_rings_against_queues",
        ),
        (
            "memory: class_balanced forgets how many rows of a full class came",
            "span = jnp.where(own, met[label], jnp.sum(pool))",
            "span = jnp.sum(pool)",
            "test_policies.py::test_class_balanced_against_one_row_at_a_time",
        ),
    ),
    *fault.of(
        "memory/buffer.py",
        "test_memory.py::test_write_against_one_row_at_a_time",
        (
            "memory: duel's slots are one too far",
            "rank = jnp.cumsum(mask, dtype=jnp.int32) - 1",
            "rank = jnp.cumsum(mask, dtype=jnp.int32)",
            "test_duel_memory.py::test_slots_pair_kept_rows_with_free_slots_in_order",
        ),
        (
            "minred: masked rows take slots",
            "fits = mask & (rank < jnp.sum(free))",
            "fits = rank < jnp.sum(free)",
            "test_redundancy.py::test_a_stream_against_one_row_at_a_time",
        ),
        (
            "loss_aware: the highest scores go",
            "order = jnp.argsort(values, stable=True)",
            "order = jnp.argsort(-values, stable=True)",
            "test_loss_aware.py::test_a_low_loss_and_many_draws_make_a_low_score",
        ),
        (
            "memory: of rows with one slot the first stays",
            "jnp.full((capacity,), -1, jnp.int32).at[slots].max(rows, mode=",
            "jnp.full((capacity,), 9999, jnp.int32).at[slots].min(rows, mode=",
        ),
        (
            "memory: masked rows are written",
            "_last_writers(slots, mask & _computed(after), buffer.capacity)",
            "_last_writers(slots, _computed(after), buffer.capacity)",
        ),
        (
            "memory: rows that are dropped do not count as seen",
            "jnp.sum(mask, dtype=jnp.uint32)",
            "jnp.sum(mask & (slots < buffer.capacity), dtype=jnp.uint32)",
        ),
        (
            "memory: empty slots are drawn",
            "drawable = buffer.filled\n",
            "drawable = jnp.ones_like(buffer.filled)\n",
            "test_memory.py::test_rows_that_do_not_exist_are_masked",
        ),
        (
            "memory: draws ignore the weights",
            "score = score + log_weights",
            "score = score + 0.0",
            "test_memory.py::test_weighted_draws_follow_the_weights",
        ),
    ),
    *fault.of(
        "memory/herding.py",
        "test_herding.py::test_against_all_rows_for_every_choice",
        (
            "memory: herding follows the mean one row late",
            "(j + 1) * mean - total",
            "j * mean - total",
        ),
        (
            "memory: herding chooses a row twice",
            "return chosen, total, left.at[row].set(False)",
            "return chosen, total, left",
        ),
    ),
    *fault.of(
        "memory/duel.py",
        "test_duel_memory.py::test_select_is_the_plain_loop[windows-affine-False]",
        (
            "memory: duel drops the most distinct row",
            "worst = jnp.argmax(scores)\n",
            "worst = jnp.argmin(jnp.where(window.alive, scores, jnp.inf))\n",
        ),
        (
            "memory: duel's sum stays as it was",
            "total=jnp.where(sure, window.total + gain, window.total)",
            "total=window.total",
        ),
        (
            "memory: duel's bound does not grow while the sum moves",
            "window.bound + moved + slack",
            "window.bound + slack",
        ),
        (
            "memory: duel's bound has no room for rounding",
            "window.bound + moved + slack",
            "window.bound + moved",
            "test_duel_memory.py::test_rows_that_are_left_out_win_no_near_tie",
        ),
        (
            "memory: duel multiplies as coarsely as the device likes to",
            "jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)",
            "jnp.matmul(a, b)",
            "test_duel_memory.py::test_scores_are_products_in_full_precision",
        ),
        (
            "memory: duel's scores lack the row that joined",
            "return present, scores + alike(_row(memory, incoming, joins))",
            "return present, scores",
            "test_duel_memory.py::test_select_is_the_plain_loop[windows-exponential-False]",
        ),
        (
            "memory: duel takes rows that do not exist",
            "comes = comes & (jnp.arange(len(incoming)) < count)",
            "comes = comes & (jnp.arange(len(incoming)) <= count)",
            "test_duel_memory.py::test_rows_that_do_not_exist_change_nothing",
        ),
        (
            "memory: duel goes on to rows that do not exist",
            "count, order = jnp.sum(incoming_mask), jnp",
            "count, order = len(incoming), jnp",
            "test_duel_memory.py::test_rows_that_do_not_exist_change_nothing",
        ),
        (
            "memory: a memory over devices is given to one kernel",
            "    if not (sharding.on_cpu() or split):",
            "    if not sharding.on_cpu():",
            "test_duel_memory.py::test_each_chip_has_its_form",
        ),
        (
            "memory: the products of all pairs take any amount of memory",
            "if kernel and len(present) <= duel_rounds.MOST:",
            "if kernel:",
            "test_duel_memory.py::test_a_kernel_takes_no_more_rows_than_it_may",
        ),
    ),
    *fault.of(
        "memory/duel_rounds.py",
        "test_duel_memory.py::test_select_is_the_plain_loop[all-affine-False]",
        (
            "memory: the sum of the rows stays as it was",
            "jnp.where(plays, total + gain, total)",
            "total",
        ),
        (
            "memory: a round over all rows evicts while there is room",
            "plays = (first <= round) & (round < end)",
            "plays = round < end",
            "test_duel_memory.py::test_a_memory_with_room_takes_what_comes_first"
            "[all-5-affine-False]",
        ),
        (
            "memory: a GPU's scores lack the row that joined",
            "scores += alike[jnp.minimum(new, last), :] - alike[worst, :]",
            "scores -= alike[worst, :]",
            "test_duel_memory.py::test_select_is_the_plain_loop[gpu-affine-False]",
        ),
        (
            "memory: on a TPU the last of equal rows goes",
            "worst = jnp.min(best).astype(jnp.int32)",
            "worst = jnp.max(jnp.where(best < 1e9, best, -1.0)).astype(jnp.int32)",
            "test_duel_memory.py::test_the_first_of_equal_rows_goes[tpu-4]",
        ),
        (
            "memory: on a TPU the row that goes stays in the scores",
            "scores + (rows[1] - rows[0])",
            "scores + rows[1]",
            "test_duel_memory.py::test_select_is_the_plain_loop[tpu-affine-False]",
        ),
    ),
    *fault.of(
        "memory/selection.py",
        "test_selection.py::test_proposal_against_loops",
        (
            "memory: the proposal counts a row's own prototype",
            "mean = jnp.sum(jnp.where(mine, 0.0, shares), axis=0)",
            "mean = jnp.sum(shares, axis=0)",
        ),
        (
            "memory: old classes have t / (t + 1) of the slots",
            "jnp.divmod((tasks - 1) * capacity, tasks)",
            "jnp.divmod(tasks * capacity, tasks + 1)",
            "test_selection.py::test_every_quota_has_its_share_as_its_mean",
        ),
    ),
    *fault.of(
        "memory/importance.py",
        "test_importance.py::test_the_gradient_is_that_of_the_sum_of_quadratics",
        (
            "memory: the penalty pushes parameters away",
            "weight * (f * p - a) / jnp.maximum",
            "weight * (a - f * p) / jnp.maximum",
        ),
        (
            "memory: the penalty holds to the last task alone",
            "lambda a, f, p: a + f * p",
            "lambda a, f, p: f * p",
        ),
        (
            "memory: squared gradients of the last task stay",
            "jax.tree.map(jnp.zeros_like, importance.squares)",
            "importance.squares",
        ),
        (
            "memory: importance is not divided by its mean",
            "x / jnp.where(mean > 0, mean, 1.0)",
            "x / jnp.where(mean > 0, 1.0, 1.0)",
        ),
    ),
    *fault.of(
        "memory/redundancy.py",
        "test_redundancy.py::test_the_most_redundant_rows_go",
        (
            "minred: the least redundant row goes",
            "left.at[jnp.argmax(jnp.where(left, nearest, -jnp.inf))]",
            "left.at[jnp.argmin(jnp.where(left, nearest, jnp.inf))]",
        ),
        (
            "minred: a row is compared with itself",
            "cosines = jnp.where(jnp.eye(len(rows), dtype=bool), -jnp.inf, cosines)",
            "cosines = jnp.maximum(cosines, -jnp.inf)",
            "test_redundancy.py::test_a_stream_against_one_row_at_a_time",
        ),
        (
            "minred: rows that have gone are still compared with",
            "nearest = jnp.max(jnp.where(left, cosines, -jnp.inf), axis=1)",
            "nearest = jnp.max(cosines, axis=1)",
        ),
        (
            "minred: rows that were never drawn compete",
            "competes = filled & used",
            "competes = filled",
            "test_redundancy.py::test_a_stream_against_one_row_at_a_time",
        ),
        (
            "minred: rows compete however few they are",
            "jnp.sum(competes) >= 2 * count",
            "jnp.sum(competes) >= count",
            "test_redundancy.py::test_a_stream_against_one_row_at_a_time",
        ),
        (
            "minred: the newest rows go in place of the oldest",
            "filled, number, jnp.iinfo(jnp.int32).max)",
            "filled, -number, jnp.iinfo(jnp.int32).max)",
            "test_redundancy.py::test_a_stream_against_one_row_at_a_time",
        ),
        (
            "minred: a new vector keeps its length",
            "(1 - _OLD) * core.l2_normalize(new)",
            "(1 - _OLD) * new",
            "test_redundancy.py::test_stored_vectors_move_half_of_the_way",
        ),
    ),
    *fault.of(
        "memory/policies.py",
        "test_redundancy.py::test_a_stream_against_one_row_at_a_time",
        (
            "minred: one row too many goes",
            "jnp.sum(mask, dtype=jnp.int32) - buffer.capacity\n    gone",
            "jnp.sum(mask, dtype=jnp.int32) - buffer.capacity + 1\n    gone",
        ),
        (
            "duel: as a policy it takes rows that do not exist",
            "filled=buffer.filled, incoming_mask=mask",
            "filled=buffer.filled, incoming_mask=mask | True",
            "test_duel_memory.py::test_as_a_policy_it_is_the_loop",
        ),
        (
            "duel: as a policy it compares with empty slots",
            "feature, filled=buffer.filled,",
            "feature, filled=None,",
            "test_duel_memory.py::test_as_a_policy_it_is_the_loop",
        ),
    ),
    *fault.of(
        "memory/loss_aware.py",
        "test_loss_aware.py::test_a_low_loss_and_many_draws_make_a_low_score",
        (
            "loss_aware: rows that were drawn often stay",
            "height - _WEIGHT * often",
            "height + _WEIGHT * often",
        ),
        (
            "loss_aware: empty slots take part in the range of losses",
            "least = jnp.min(jnp.where(filled, loss, jnp.inf))",
            "least = jnp.min(loss)",
        ),
        (
            "loss_aware: a running loss is the last one",
            "return _OLD * old + (1 - _OLD) * new",
            "return new",
            "test_loss_aware.py::test_a_running_loss_moves_half_of_the_way",
        ),
    ),
    *fault.of(
        "memory/policies.py",
        "test_loss_aware.py"
        "::test_rows_enter_as_in_a_reservoir_and_the_lowest_score_goes",
        (
            "loss_aware: a row takes the slot that the reservoir drew",
            "slot = jnp.where((slot < capacity) & jnp.all(filled), worst, slot)",
            "slot = jnp.where((slot < capacity) & False, worst, slot)",
        ),
        (
            "loss_aware: rows that entered keep the draws of those that went",
            "draws = draws.at[slot].set(0, mode=",
            "draws = draws.at[slot].add(0, mode=",
        ),
        (
            "loss_aware: rows go before the memory is full",
            "gone = buffer_lib.lowest(value, jnp.clip(excess, 0, stored))",
            "gone = buffer_lib.lowest(value, stored)",
            "test_loss_aware.py::test_every_row_enters_and_the_lowest_scores_go",
        ),
    ),
    *fault.of(
        "methods/online_ssl/stored.py",
        "test_online_ssl.py::test_a_stream_is_the_equations[byol-loss_aware]",
        (
            "loss_aware: a view is compared with itself",
            "core.l2_normalize(target[:, ::-1])",
            "core.l2_normalize(target)",
        ),
        (
            "loss_aware: draws are not counted",
            'changes["draws"] = items["draws"] + 1',
            'changes["draws"] = items["draws"]',
        ),
        (
            "loss_aware: byol is compared with its own projections",
            "target = outputs.z if features.k is None else features.k",
            "target = outputs.z",
        ),
    ),
    *fault.of(
        "memory/diversity.py",
        "test_gss.py::test_the_policy_of_online_ssl_is_algorithm_two_row_by_row",
        (
            "gss: rows that do not exist enter",
            "slot = jnp.where(exists, slot, capacity).astype(jnp.int32)",
            "slot = slot.astype(jnp.int32)",
        ),
        slow=True,
    ),
    *fault.of(
        "memory/policies.py",
        "test_gss.py::test_the_policy_of_online_ssl_is_algorithm_two_row_by_row",
        (
            "gss: the policy of online_ssl compares incoming rows with themselves",
            'held = buffer.items["score"]\n',
            'held = jnp.resize(items["score"], buffer.filled.shape)\n',
        ),
        slow=True,
    ),
    *fault.of(
        "methods/online_ssl/stored.py",
        "test_online_ssl.py::test_a_stream_is_the_equations[simsiam-gss]",
        (
            "gss: without labels rows are compared with incoming ones",
            "jnp.sum(slopes[: setup.size], axis=0, keepdims=True)",
            "jnp.sum(slopes[setup.size :], axis=0, keepdims=True)",
        ),
        (
            "gss: without labels rows are compared before any is replayed",
            "diversity.score(slopes, past, active[None])",
            "diversity.score(slopes, past, active[None] | True)",
        ),
        (
            "gss: the gradient without labels is that of one view",
            "return jnp.sum(slopes, axis=1)",
            "return slopes[:, 0]",
            "test_gss.py"
            "::test_the_gradient_of_an_image_is_that_of_a_shift_of_its_queries",
        ),
        slow=True,
    ),
    *fault.of(
        "memory/queue.py",
        "test_queue.py::test_enqueue_against_a_list",
        (
            "memory: the pointer of a queue at rest moves",
            "(pointer + jnp.where(active, count, 0)) % size",
            "(pointer + count) % size",
        ),
        (
            "memory: a queue at rest is written",
            "rows = jnp.where(active, rows, old)",
            "rows = jnp.where(True, rows, old)",
        ),
        (
            "memory: a queue's end is cut off where batches have two sizes",
            "if aligned and size % count == 0:",
            "if size % count == 0:",
            "test_queue.py::test_batches_of_two_sizes_overwrite_the_oldest_rows",
        ),
    ),
    *fault.of(
        "memory/duel.py",
        "test_duel_memory.py::test_nothing_is_distinct_from_an_empty_memory",
        (
            "memory: an empty memory is alike to some row",
            "return jnp.where(count > 0, -jnp.log(share), jnp.inf)",
            "return -jnp.log(share)",
        ),
        (
            "memory: rounding makes distinctiveness nan",
            "jnp.maximum(1 + products / jnp.maximum(count, 1), 0) / 2",
            "(1 + products / jnp.maximum(count, 1)) / 2",
            "test_duel_memory.py::test_a_row_opposite_to_all_stored_ones_is_distinct_"
            "beyond_bounds",
        ),
        slow=True,
    ),
    *fault.of(
        "memory/queue.py",
        "test_queue.py::test_on_a_gpu_a_queue_lies_as_the_state_has_it",
        (
            "memory: a queue lies as a GPU's loop wants it",
            'if sharding.platform() == "gpu":',
            'if sharding.platform() == "cuda":',
        ),
        slow=True,
    ),
]
