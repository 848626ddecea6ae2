"""Faults in what a step would take on chips that are not there."""

from faults import fault

TEXT = "test_targets_text.py"

FAULTS = [
    *fault.of(
        "scaling/hlo.py",
        f"{TEXT}::test_turns_that_the_condition_tells",
        (
            "targets: a loop runs until its counter differs",
            'case ("LT", ("element", place), ("constant", limit)):',
            'case ("LT" | "NE", ("element", place), ("constant", limit)):',
        ),
        (
            "targets: a counter may rise by anything",
            'one = ("element", place), ("constant", 1)',
            "one = raised[1:] if raised else ()",
            f"{TEXT}::test_only_a_counter_by_one_tells_the_turns",
        ),
        (
            "targets: all counters begin at 0",
            "    return max(limit - first[1], 0)",
            "    return limit",
            f"{TEXT}::test_turns_count_from_where_the_counter_begins",
        ),
        (
            "targets: the loop over the steps is not found",
            "        turns[loop] = steps",
            "        turns[loop] = 1",
            f"{TEXT}::test_the_loop_over_the_steps_is_found",
        ),
        (
            "targets: an array on the chip is one in its memory",
            "int(space[1]) if (space := _SPACE.search(layout)) else 0",
            "0 if (space := _SPACE.search(layout)) else 0",
            f"{TEXT}::test_bytes_of_an_operation",
        ),
    ),
    *fault.of(
        "scaling/kernels.py",
        f"{TEXT}::test_arithmetic_is_that_of_the_step",
        (
            "targets: products with padding count",
            "count += place % lhs == 0 and 0 <= place < given * lhs",
            "count += 1",
        ),
        (
            "targets: a multiply-add is one",
            "        2 * taps * features * batch,",
            "        taps * features * batch,",
        ),
        (
            "targets: cuDNN's gradient of a kernel is a forward pass",
            '"BackwardFilter": (0, None, 1),',
            '"BackwardFilter": (0, 1, None),',
        ),
        (
            "targets: a TPU's groups are taps",
            "        if size > 1 and lhs == size and stride == size - 1:",
            "        if size > 1 and lhs == size and stride == size + 1:",
            f"{TEXT}::test_groups_of_a_convolution_are_seen",
        ),
        (
            "targets: the whole of a queue is written",
            "        min(of(value), _bytes(array))",
            "        max(of(value), _bytes(array))",
            f"{TEXT}::test_what_is_updated_in_place_is_not_read",
        ),
        (
            "targets: what is sliced is read whole",
            "total += array.bytes if sliced is None else min(sliced, array.bytes)",
            "total += array.bytes",
            f"{TEXT}::test_bytes_of_what_a_fusion_slices",
        ),
        (
            "targets: a loop's body runs once",
            "            often = times * (program.turns[op.name] or 1)",
            "            often = times",
            f"{TEXT}::test_a_loop_of_known_length_runs_as_often",
        ),
    ),
    *fault.of(
        "scaling/collectives.py",
        f"{TEXT}::test_messages_of_a_step",
        (
            "targets: messages are of a call and not of a step",
            "    once = 1 if steps == 1 else 1 / steps",
            "    once = 1",
        ),
        (
            "targets: a message in pieces is as many",
            "                if len(chains[chain]) > 2:",
            "                if len(chains[chain]) > 99:",
            f"{TEXT}::test_a_message_that_a_tpu_sends_piece_by_piece_is_one",
        ),
        (
            "targets: nothing runs beside a message",
            "        beside = sum(hlo.runs(x) for x in between)",
            "        beside = 0 * len(between)",
            f"{TEXT}::test_a_gpu_runs_something_beside_its_messages",
        ),
    ),
    *fault.of(
        "scaling/targets.py",
        f"{TEXT}::test_the_least_time_is_what_each_kernel_is_bound_by",
        (
            "targets: a kernel is bound by its arithmetic",
            "        longest = max(parts)",
            "        longest = parts[0]",
        ),
        (
            "targets: float32 is as fast as bfloat16",
            'wide = kernel.dtype == "float32"',
            'wide = kernel.dtype == "float64"',
        ),
        (
            "targets: messages are free",
            "        if not message.beside:",
            "        if message.beside:",
        ),
        (
            "targets: any error of a compiler is a lack of memory",
            "        if not _FULL.search(str(error)):",
            "        if _FULL.search(str(error)) is error:",
            f"{TEXT}::test_other_errors_of_a_compiler_are_not_hidden",
        ),
        (
            "targets: the search for a batch ends too soon",
            "    while high - low > max(low // 16, 1):",
            "    while high - low > max(low // 2, 1):",
            f"{TEXT}::test_the_largest_batch_is_found",
        ),
    ),
    *fault.of(
        "sharding.py",
        f"{TEXT}::test_a_job_for_devices_that_are_described",
        (
            "targets: the mesh is of the devices that are here",
            "devices = list(described) if described else jax.devices()",
            "devices = jax.devices()",
        ),
        (
            "targets: a program for elsewhere is one for CPUs",
            'return jax.default_backend() == "cpu" and _ELSEWHERE.get() is None',
            'return jax.default_backend() == "cpu" and _ELSEWHERE.get() is not None',
        ),
    ),
]
