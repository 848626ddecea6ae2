"""Faults in what a step would take on chips that are not there."""

from faults import fault

TEXT = "test_targets_text.py"
CHIP = "test_accelerator_benchmark.py"
INPUT = "test_input_benchmark.py"

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
        "test_targets_text.py::test_a_program_that_is_known_is_not_compiled",
        (
            "targets: a known program is compiled",
            'if found["program"] == known:',
            "if False:",
        ),
        (
            "targets: no program is compiled where one is known",
            'if found["program"] == known:',
            "if known:",
        ),
    ),
    *fault.of(
        "scaling/targets.py",
        f"{TEXT}::test_products_without_tiles_are_those_of_the_library",
        (
            "targets: a product without tiles is an error",
            "if _NO_TILES not in str(error):",
            "if True:",
        ),
        (
            "targets: that options were needed is not said",
            '"options": options,',
            '"options": {},',
        ),
    ),
    *fault.of(
        "scaling/targets.py",
        f"{TEXT}::test_what_a_text_tells_in_numbers",
        (
            "targets: cycles that overflowed are added up",
            "x.cycles == kernels.NO_ESTIMATE",
            "x.cycles == 0",
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
            "name = elsewhere.platform if elsewhere else jax.default_backend()",
            "name = jax.default_backend()",
        ),
    ),
    *fault.of(
        "sharding.py",
        "test_layouts.py::"
        "test_kernels_lie_as_a_gpu_takes_them_and_files_have_them_as_usual",
        (
            "targets: kernels lie on a GPU as on a CPU",
            "_LAYOUT = Layout(major_to_minor=core.KERNEL_ORDER)",
            "_LAYOUT = Layout(major_to_minor=(0, 1, 2, 3))",
        ),
        (
            "targets: files have kernels as a GPU takes them",
            "layout = Layout(major_to_minor=tuple(range(leaf.ndim)))",
            "layout = _LAYOUT",
        ),
        (
            "targets: a GPU's layouts are for every platform",
            'return platform() == "gpu" and name.endswith("kernel")',
            'return name.endswith("kernel")',
        ),
    ),
    *fault.of(
        "../benchmarks/accelerator.py",
        f"{CHIP}::test_what_was_late_is_begun_where_there_is_more_time",
        (
            "accelerator: what was late is never tried again",
            'return entry is not None and "late" not in entry',
            "return entry is not None",
        ),
        (
            "accelerator: what was late is tried again in as little time",
            'if entry and entry.get("late", 0) >= left and not args.again:',
            'if entry and entry.get("late", 0) < 0 and not args.again:',
        ),
        (
            "accelerator: it does not stop in time",
            "if left < (1 if args.rehearse else LEAST):",
            "if left < (1 if args.rehearse else -LEAST):",
            f"{CHIP}::test_it_stops_in_time_and_goes_on",
        ),
        (
            "accelerator: numbers of two chips on one page",
            'if before["device"] != about["device"]:',
            'if before["platform"] != about["platform"]:',
            f"{CHIP}::test_it_stops_in_time_and_goes_on",
        ),
        (
            "accelerator: PyTorch is timed where it has no chip",
            'peers = not args.no_peer and (about["torch_has_it"] or args.rehearse)',
            "peers = not args.no_peer",
            f"{CHIP}::test_what_is_of_most_interest_comes_first",
        ),
        (
            "accelerator: the ratio is turned over",
            'x.peer["ms"] / o["ms"]',
            'o["ms"] / x.peer["ms"]',
            f"{CHIP}::test_the_page_shows_what_was_measured",
        ),
    ),
    *fault.of(
        "../benchmarks/accelerator_rows.py",
        f"{CHIP}::test_windows_last_as_long_as_asked_and_take_turns",
        (
            "accelerator: a call counts as one step",
            "in_call = step.steps // step.calls",
            "in_call = 1",
        ),
        (
            "accelerator: a lack of memory is an error as others",
            "if any(word in text for word in _FULL):",
            "if all(word in text for word in _FULL):",
            f"{CHIP}::test_errors_are_told_in_a_line",
        ),
    ),
    *fault.of(
        "../benchmarks/input.py",
        f"{INPUT}::test_what_chips_ask_for",
        (
            "input: one host feeds all chips",
            '"likely": target.chips * peak / work / hosts,',
            '"likely": target.chips * peak / work,',
        ),
        (
            "input: the slowest of some runs counts",
            "return min(spent) / count",
            "return max(spent) / count",
            f"{INPUT}::test_the_least_of_some_runs_counts",
        ),
    ),
    *fault.of(
        "core.py",
        "test_core.py::test_norms_are_those_of_the_leaves",
        (
            "norms: of this leaf and those before it",
            "owned = jnp.arange(len(rows))[:, None] == owner",
            "owned = jnp.arange(len(rows))[:, None] >= owner",
        ),
        (
            "norms: what does not fill a row is left out",
            "jnp.pad(x, (0, -x.size % _ROW)).reshape(-1, _ROW)",
            "jnp.pad(x, (0, _ROW))[: x.size // _ROW * _ROW].reshape(-1, _ROW)",
        ),
        (
            "norms: that of all leaves is their sum",
            "return jnp.linalg.norm(jnp.stack(_norms_by_row(leaves)))",
            "return jnp.sum(jnp.stack(_norms_by_row(leaves)))",
        ),
        (
            "norms: a GPU sums them one by one",
            "leaves, cuda=_norms_by_row, rocm=_norms_by_row,",
            "leaves, rocm=_norms_by_row,",
            "test_core.py::test_a_gpu_sums_all_leaves_at_once",
        ),
    ),
    *fault.of(
        "core.py",
        "test_core.py::test_a_gpu_sums_kernels_in_the_order_they_lie_in",
        (
            "norms: a GPU turns kernels of convolutions before it sums them",
            "(x.transpose(KERNEL_ORDER) if x.ndim == 4 else x).ravel()",
            "x.ravel()",
        ),
        slow=True,
    ),
    *fault.of(
        "optim.py",
        "test_core.py::test_lars_takes_the_same_step_on_a_gpu "
        "test_optim.py::test_lars_follows_the_released_code",
        (
            "norms: LARS takes those of the gradient for both",
            "norms = core.norms(grads), core.norms(params)",
            "norms = core.norms(grads), core.norms(grads)",
        ),
    ),
    *fault.of(
        "data/prefetch.py",
        "test_prefetch.py::test_workers_keep_the_memory_of_images",
        (
            "input: workers give the memory of an image back",
            "        adjust(_MMAP_MAX, 0)",
            "        adjust(_MMAP_MAX, 65536)",
        ),
    ),
    *fault.of(
        "scaling/command.py",
        f"{TEXT}::test_a_child_that_stands_in_for_a_target_measures_alone",
        (
            "targets: a child begins with the targets again",
            "        if values.one is not None:",
            "        if values.one is not None and not asked:",
        ),
    ),
]
