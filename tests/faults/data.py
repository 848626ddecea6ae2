"""Faults of data and views, and of how a run goes through its tasks."""

from faults import fault

FAULTS = [
    *[
        *fault.of(
            "config/sections.py",
            "test_schema.py::test_nonsense_is_refused",
            (
                "config: growth is passed over by other scenarios",
                "    scenarios.check_readers(name, given)\n",
                "",
                "test_stream.py::test_an_option_changes_the_tasks_or_is_refused[class]",
            ),
            (
                "config: a rate grows to infinity with the batch",
                "schema.check_value(peak, schema.Positive, field)",
                "assert field",
            ),
            (
                "config: the name of a scenario may be overridden in silence",
                'own = ("scenario",)',
                "own = ()",
            ),
            (
                "config: a section of an evaluator may be anything",
                'schema.check_value(section, dict, f"config.evaluators.{key}")',
                "assert key",
            ),
        ),
        *fault.of(
            "data/from_arrays.py",
            "test_hostile_data.py::test_a_file_in_place_of_a_directory_of_arrays_"
            "is_told_what_to_make_of_it",
            (
                "arrays: a file is to be converted to its own place",
                'folder = str(path).removesuffix(".npz")',
                "folder = str(path)",
            ),
            (
                "arrays: test rows without a domain are of the first",
                "if 0 < len(without) < len(domains):",
                "if not domains:",
                "test_sources.py::test_arrays_written_by_hand",
                "test_sources.py::test_npz_errors",
            ),
            (
                "arrays: a file with other keys is said to be empty",
                "has = sorted(files.read_npz(path))[:10]",
                "has = sorted(data)",
                "test_sources.py::test_npz_errors",
            ),
            (
                "arrays: names of classes in bytes have quotation marks",
                'if given.dtype.kind == "S":',
                'if given.dtype.kind == "T":',
                "test_sources.py::test_npz_with_domains_and_a_test_mask",
            ),
            (
                "arrays: images that were written anew are those from before",
                "files.mapped.cache_clear()",
                "files.mapped",
                "test_sources.py::test_arrays_written_by_hand",
            ),
        ),
        *fault.of(
            "data/from_tfds.py",
            "test_sources.py::test_tfds_that_is_prepared_anew_is_read_anew",
            (
                "tfds: images that were prepared anew are those from before",
                "_reader.cache_clear()",
                "_reader",
            ),
            (
                "tfds: names of domains that there are not are passed over",
                "several = len(paths) > 1 or domain_names",
                "several = len(paths) > 1",
                "test_sources.py::test_tfds_errors",
            ),
            (
                "tfds: a part of no examples is a traceback",
                "if not shards:",
                "if not infos:",
                "test_sources.py::test_tfds_errors",
            ),
            (
                "tfds: labels that were prepared anew are those of the index",
                "str(label_key), str(domain_key), *prepared, *ranges",
                "str(label_key), str(domain_key), *ranges",
            ),
        ),
        *fault.of(
            "config/build.py",
            "test_schema.py::test_nonsense_is_refused",
            (
                "config: steps are counted beyond int32",
                "if steps > _MOST_STEPS:",
                "if steps < 0:",
            ),
            (
                "config: what JSON does not know is a traceback",
                "if value is None or isinstance(value, bool | int | float | str):",
                "if True:",
            ),
        ),
        *fault.of(
            "schema.py",
            "test_schema.py::test_nonsense_is_refused",
            (
                "config: a name that is no path into a package is imported",
                "return len(parts) > 1 and all(part.isidentifier() for part in parts)",
                "return len(parts) > 1",
            ),
        ),
        *fault.of(
            "data/scenarios.py",
            "test_stream.py::test_an_option_changes_the_tasks_or_is_refused",
            (
                "scenarios: copies make steps of an epoch into rows",
                "if copies > 1 and steps is not None:",
                "if copies < 1:",
                "test_imbalance.py::test_copies_leave_the_steps_of_an_epoch_alone",
            ),
            (
                'config: scenario "after" passes over a long tail',
                '"long_tail": _UNEVEN,',
                '"long_tail": SCENARIOS,',
            ),
            (
                "scenarios: Python's options are not looked at",
                "    check_readers(scenario, given)\n",
                "",
            ),
            (
                "scenarios: an order of classes is refused of a joint run",
                '_PASSED_OVER = {"class_order": ("joint", "data")}',
                '_PASSED_OVER = {"class_order": ("data",)}',
            ),
            (
                "scenarios: a default that is given is refused",
                "if not takes and value != defaults[option]:",
                "if not takes and option in options:",
            ),
        ),
        *fault.of(
            "methods/icl/method.py",
            "test_schema.py::test_nonsense_is_refused",
            (
                "config: ICL compares an anchor with no other row",
                "if parts.batch_size == 1:",
                "if parts.batch_size == -1:",
            ),
        ),
        *fault.of(
            "methods/icl/method.py",
            "test_icl.py::test_wrong_options_are_refused",
            (
                "config: ICL takes a rate of the inner steps that its agents set",
                'for name in ("fixed_lr", "inner_lr"):',
                'for name in ("fixed_lr",):',
            ),
        ),
        *fault.of(
            "methods/online/replay.py",
            "test_schema.py::test_nonsense_is_refused",
            (
                "config: a memory of all classes is larger than int32",
                "schema.check_value(capacity, schema.Count, field)",
                "assert field",
            ),
        ),
        *fault.of(
            "methods/two_view/step.py",
            "test_schema.py::test_options_of_other_bases_and_strategies_are_told",
            (
                "config: options of PNR are passed over in silence",
                '("pn1", "pn2"): pnr,',
                '("pn1", "pn2"): True,',
            ),
            (
                "config: a weight that contrastive PNR lacks is passed over",
                "distils = plan.distiller and not (pnr and contrastive)",
                "distils = plan.distiller",
            ),
        ),
        *fault.of(
            "update/command.py",
            "test_update.py::test_what_the_new_task_refuses_is_one_line",
            (
                "update: what the new task refuses is a traceback",
                "return planned, prepare(planned) if report is None else None",
                "return planned, None",
            ),
        ),
        *fault.of(
            "update/command.py",
            "test_update.py::test_an_unfinished_update_is_not_mixed_with_another",
            (
                "update: a stopped one of another config asks for a --workdir",
                "except claim.Differs as error:",
                "except KeyError as error:",
            ),
            slow=True,
        ),
        *fault.of(
            "update/command.py",
            "test_update.py"
            "::test_the_smaller_batch_of_few_images_ends_with_their_update",
            (
                "update: the smaller batch of few images is handed on",
                '        own = {**own, "batch_size": lineage.batch_size(run)}\n',
                "",
            ),
        ),
        *fault.of(
            "update/lineage.py",
            "test_update.py"
            "::test_the_smaller_batch_of_few_images_ends_with_their_update",
            (
                "update: the batch size of an update that was rolled back is handed on",
                'if size is not None and report["accepted"]:',
                "if size is not None:",
            ),
        ),
        *fault.of(
            "update/command.py",
            "test_update.py::test_a_warmup_that_the_epochs_do_not_hold_is_shorter",
            (
                "update: a warmup that the epochs do not hold stays",
                "    own = _with_short_warmup(own, changes)\n",
                "",
            ),
        ),
        *fault.of(
            "update/lineage.py",
            "test_update.py::test_a_run_that_cannot_be_updated",
            (
                "update: a run whose config left tasks out is to be let finish",
                "results_lib.finished(results) == first:",
                "results_lib.finished(results) > first:",
            ),
        ),
        *fault.of(
            "update/lineage.py",
            "test_update.py"
            "::test_flags_change_the_recipe_of_an_encoder_option_by_option",
            (
                "update: an empty section takes the place of none",
                "if isinstance(value, dict) and value:",
                "if isinstance(value, dict):",
            ),
            (
                "update: an option takes the place of its whole section",
                "{**(theirs.get(name) or {}), **value}",
                "{**value}",
            ),
        ),
        *fault.of(
            "config/command.py",
            "test_command.py",
            (
                "command: an option without its config is not suggested",
                "message += _hint(error.flagname, section)",
                "message += section[:0]",
            ),
            (
                "command: a word for a config without variants is a traceback",
                'if "\\nTypeError: get_config() takes 0 positional" in message:',
                'if "\\nTypeError: takes 0 positional" in message:',
            ),
        ),
        *fault.of(
            "data/storage.py",
            "test_hostile_data.py::test_links_in_circles_multiply_no_row",
            (
                "data: a link may lead into another class",
                "own in visited or (own in apart and where != path)",
                "own in visited",
            ),
            (
                "data: a link may lead to a folder above the set",
                "yield identity(path)\n\n\ndef _walk",
                "yield -1, -1\n\n\ndef _walk",
            ),
            (
                "data: a folder is read as often as ways lead to it",
                "own in visited or (own in apart and where != path)",
                "own in apart and where != path",
                "test_hostile_data.py::"
                "test_a_folder_that_two_ways_lead_to_is_read_once_where_it_lies",
            ),
            (
                "data: JSON that is nested too deeply is a traceback",
                "except (ValueError, RecursionError)",
                "except ValueError",
                "test_hostile_data.py::test_a_json_file_of_anything",
            ),
        ),
        *fault.of(
            "data/storage.py",
            "test_hostile_data.py::test_a_pipe_among_the_images",
            (
                "data: a pipe is read like a file",
                "if not in_bucket(path) and not stat.S_ISREG",
                "if in_bucket(path) and not stat.S_ISREG",
            ),
        ),
        *fault.of(
            "data/in_memory.py",
            "test_in_memory.py::"
            "test_labels_are_numbered_in_sorted_order_and_may_be_unknown",
            (
                "data: a negative number among None is a class",
                "(label is not None and label >= 0)",
                "label is not None",
            ),
        ),
        *fault.of(
            "data/from_folders.py",
            "test_hostile_data.py::test_links_in_circles_multiply_no_row",
            (
                "data: a link may lead from train/ to all of test/",
                "if inner and apart:",
                "if False:",
            ),
            (
                "data: images without a class are dropped in silence",
                "if left_out := len(files_lib.image_files(folder, apart)):",
                "if left_out := 0:",
                "test_sources.py::"
                "test_images_beside_the_folders_of_classes_are_counted",
            ),
            (
                "data: a class called train is all of the set",
                "not (names or _is_empty(path, x))",
                "False",
                "test_sources.py::test_classes_and_splits_are_not_taken_for_each_other",
            ),
            (
                "data: a folder called valid is passed over",
                "x in alike or",
                "",
                "test_sources.py::test_classes_and_splits_are_not_taken_for_each_other",
            ),
            (
                "data: folders called Train and Test are classes",
                "if alike and alike == beside:",
                "if False:",
                "test_sources.py::test_classes_and_splits_are_not_taken_for_each_other",
            ),
            (
                "data: nothing but splits may lie beside train",
                "not (names or _is_empty(path, x))",
                "not names",
                "test_sources.py::test_what_holds_no_images_may_lie_beside_train",
            ),
            (
                "data: two classes may be one folder",
                "if other != path:",
                "if other is None:",
                "test_hostile_data.py::test_two_classes_that_are_one_folder",
            ),
            (
                "data: file names must be UTF-8",
                "[os.fsencode(file[len(start) :]",
                "[str.encode(file[len(start) :]",
                "test_hostile_data.py::test_names_that_are_not_utf8",
            ),
        ),
        *fault.of(
            "data/files.py",
            "test_hostile_data.py::"
            "test_an_image_of_too_many_pixels_is_refused_by_its_header",
            (
                "data: floating pixels are cut off to black",
                'if image.mode == "F" or low < 0 or high > 255:',
                "if low < 0 or high > 255:",
                "test_sources.py::"
                "test_pixels_of_an_unknown_range_are_refused_and_not_cut_off",
            ),
            (
                "data: 32-bit pixels are cut off to white",
                "or low < 0 or high > 255:",
                "or low < 0:",
                "test_sources.py::"
                "test_pixels_of_an_unknown_range_are_refused_and_not_cut_off",
            ),
            (
                "data: substitutes are of a class by the numbers of the whole set",
                "label=None if self.label is None else self.label[rows],",
                "",
                "test_sources.py::"
                "test_of_some_classes_the_substitute_is_of_the_right_one",
            ),
            (
                "data: headers of images are believed",
                "if not 0 < height * width <= max_pixels:",
                "if not 0 < height * width:",
            ),
            (
                "data: sizes of images are read as width, height",
                "return number(place + 5, 2), number(place + 7, 2)",
                "return number(place + 7, 2), number(place + 5, 2)",
                "test_hostile_data.py::test_headers_are_those_that_pillow_reads",
            ),
            (
                "data: the limit on pixels does not reach the decoder",
                '"channels": self.channels, "max_pixels": self.max_pixels',
                '"channels": self.channels, "max_pixels": PIXELS',
                "test_hostile_data.py::"
                "test_the_limit_on_pixels_is_an_option_of_the_source",
            ),
            (
                "data: headers of arrays are believed",
                "or need > size:",
                "or need < 0:",
                "test_hostile_data.py::test_headers_of_arrays_that_lie",
            ),
            (
                "data: the directory of an archive is believed",
                "if info.file_size > most:",
                "if info.file_size < 0:",
                "test_hostile_data.py::test_a_directory_of_an_archive_that_lies",
            ),
            (
                "data: the shape of packed images is believed",
                "if c not in (1, 3) or n * h * w > PIXELS * len(pointers):",
                "if c not in (1, 3):",
                "test_hostile_data.py::test_packed_images_that_lie",
            ),
        ),
        *fault.of(
            "data/from_arrays.py",
            "test_hostile_data.py::test_labels_that_no_class_can_have",
            (
                "data: labels beyond int32 become others",
                "not least <= values.min() <= values.max() < stream.LABELS",
                "not least <= values.astype(np.int32).min()",
            ),
        ),
        *fault.of(
            "data/from_arrays.py",
            "test_sources.py::test_npz_errors",
            (
                "arrays: classes without names are refused",
                'tuple(meta.get("class_names", ())) or _numbers(parts, "label")',
                'tuple(meta.get("class_names", ()))',
                "test_sources.py::test_arrays_written_by_hand",
            ),
            (
                "npz: a validation split is passed over",
                'validation=parts.get("val"),',
                "validation=None,",
                "test_sources.py::test_npz_with_a_validation_split_of_its_own",
            ),
            (
                "data: one image in colour is read as many grey ones",
                "images.ndim == 3 and images.shape[2] in (1, 3, 4)",
                "images.ndim == 3 and images.shape[2] in ()",
            ),
        ),
        *fault.of(
            "data/from_graphs.py",
            "test_hostile_data.py::test_graphs_that_cannot_be",
            (
                "data: nodes of graphs need no bytes",
                "yield 0 < nodes <= max(few, told)",
                "yield 0 < nodes",
            ),
            (
                "data: unsigned pointers rise by falling",
                "arrays[key] = values.astype(np.int64)",
                "arrays[key] = values",
                "test_hostile_data.py::test_unsigned_pointers_do_not_rise_by_falling",
            ),
        ),
        *fault.of(
            "data/stream.py",
            "test_hostile_data.py::test_classes_of_one_name",
            ("data: two classes may have one name", "if count > 1]", "if count > 9]"),
        ),
        *fault.of(
            "data/splits.py",
            "test_hostile_data.py::test_grey_train_and_coloured_test_images",
            (
                "data: train images are grey and test images coloured",
                "if len({*found.values()} - {None}) > 1:",
                "if len({*found.values()} - {None}) > 2:",
            ),
        ),
        *fault.of(
            "data/prefetch.py",
            "test_hostile_data.py::test_a_line_of_pixels_is_not_blown_up",
            ("data: a line of pixels is blown up", "h * w > _RESIZED", "h * w < 0"),
            (
                "data: every worker starts the run of an unguarded script again",
                "workers if _may_start_workers() else 0",
                "workers",
                "test_prefetch.py::test_a_script_that_would_run_again_in_every_worker_"
                "has_threads",
            ),
        ),
        *fault.of(
            "data/duplicates.py",
            "test_hostile_data.py::test_rows_that_are_there_already_are_counted",
            (
                "data: test rows that are trained on are not told",
                'where[0] == "train" != split',
                'where[0] == "test" != split',
            ),
            (
                "data: each repeated test row is counted as trained on",
                "known += digest not in seen and",
                "known +=",
            ),
            (
                "data: large sets are looked through unasked",
                "rows <= ROWS and size <= BYTES",
                "rows <= ROWS",
                "test_hostile_data.py::"
                "test_a_run_tells_duplicates_where_that_is_quick_or_asked_for",
            ),
        ),
        *fault.of(
            "data/one_pass.py",
            "test_one_pass.py::test_a_blurry_stream_has_each_row_once",
            (
                "streams: the schedule is twice as wide",
                "/ (2 * width**2)",
                "/ (8 * width**2)",
                "test_one_pass.py::test_weights_are_those_of_the_schedule",
            ),
            (
                "streams: centres are at the begin of a class",
                "np.arange(len(order)) + 0.5",
                "np.arange(len(order))",
            ),
            (
                "streams: a class without rows is drawn again",
                "centres[which] = np.inf",
                "centres[which] += 0",
            ),
            (
                "streams: rows of a class come in their order",
                "pools = [rng.permutation(np.flatnonzero(label == c)) for c in order]",
                "pools = [np.flatnonzero(label == c)[::-1] for c in order]",
            ),
            (
                "streams: classes come back however small the chance",
                "if rng.random() < recurrence:",
                "if rng.random() >= recurrence:",
                "test_one_pass.py::test_recurrence_at_its_ends",
            ),
            (
                "streams: a class that comes back brings all of its rows",
                "parts[index].append(share)",
                "parts[index].append(rows)",
                "test_one_pass.py::test_recurring_tasks_share_out_each_class",
            ),
            (
                "streams: copies do not follow one another",
                "np.repeat(self.order(rng, rows, 1).ravel(), self.copies)",
                "np.tile(self.order(rng, rows, 1).ravel(), self.copies)",
                "test_one_pass.py::test_copies_follow_one_another",
            ),
        ),
        *fault.of(
            "data/scenarios.py",
            "test_one_pass.py::test_a_blurry_scenario_is_one_sequence_in_slices",
            (
                "streams: a blurry stream is shuffled",
                "train = task.train._replace(order=one_pass.given)",
                "train = task.train",
            ),
        ),
        *fault.of(
            "data/scenarios.py",
            "test_stream.py::test_class_scenario_released_order_in_tens",
            (
                "data: the order of classes is ignored",
                "chunks, rng = np.array_split(order, num_tasks),",
                "chunks, rng = np.array_split(np.sort(order), num_tasks),",
            ),
            (
                "data: a task is judged on all classes",
                "np.flatnonzero(np.isin(judge.label, classes))",
                "np.arange(len(judge.label))",
                "test_stream.py::test_class_scenario_partitions_by_label",
            ),
            (
                "data: earlier rows are also the task's own",
                "*before[:index]]",
                "*before[: index + 1]]",
                "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
            ),
            (
                "data: earlier rows lack those of the last task",
                "*before[:index]]",
                "*before[: max(index - 1, 0)]]",
                "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
            ),
            (
                "data: earlier rows are those before the tail was cut",
                "tasks = imbalance_lib.applied(dataset, tasks, imbalance, long_tail)\n"
                "    tasks = _with_earlier_rows([_repeated(task, copies) for task in "
                "tasks])",
                "tasks = _with_earlier_rows(tasks)\n"
                "    tasks = imbalance_lib.applied("
                "dataset, tasks, imbalance, long_tail)",
                "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
            ),
            (
                "data: earlier rows of another run are also the new ones",
                "np.flatnonzero(domain < last)",
                "np.flatnonzero(domain <= last)",
                "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
            ),
            (
                "data: slices are not shuffled",
                "np.split(shuffled, cuts)",
                "np.split(by_label, cuts)",
                "test_stream.py::test_data_scenario_slices_the_released_permutation",
            ),
            (
                "data: the last slice takes the remainder",
                "cuts = [remainder + length * (index + 1)",
                "cuts = [length * (index + 1)",
                "test_stream.py::test_data_scenario_slices_the_released_permutation",
            ),
            (
                "data: a domain is judged on all domains",
                "np.isin(judge.domain, (domain, -1))",
                "np.ones(len(judge.domain), bool)",
                "test_stream.py::test_domain_scenario",
            ),
            (
                "data: growth is the share of the old rows",
                "old = round((1 - growth) * len(rows))",
                "old = round(growth * len(rows))",
                "test_converge.py::test_growth_cuts_by_the_seed",
            ),
        ),
        *fault.of(
            "data/stream.py",
            "test_stream.py::test_schedule_is_random_access_over_seeded_epochs",
            (
                "data: every epoch has the same order",
                "default_rng([plan.seed, plan.task, epoch])",
                "default_rng([plan.seed, plan.task, 0])",
            ),
            (
                "data: every task has the same order",
                "default_rng([plan.seed, plan.task, epoch])",
                "default_rng([plan.seed, 0, epoch])",
            ),
            (
                "data: a picture of a stream has every task in the first one's order",
                "task=task.index, epochs=1",
                "task=0, epochs=1",
                "test_stream.py::test_rows_arrive_as_the_schedules_of_the_tasks_say",
            ),
            (
                "data: the released order is that of seed 5 for every seed",
                "return released_permutation(n, seed=seed)",
                "return released_permutation(n, seed=CASSLE_SEED)",
                "test_stream.py::test_class_scenario_partitions_by_label",
            ),
            (
                "data: every task has the epochs of the first",
                "epochs = by_task[min(task, len(by_task) - 1)] if by_task else 0",
                "epochs = by_task[0] if by_task else 0",
                "test_stream.py::test_first_tasks_may_have_epochs_of_their_own",
            ),
        ),
        *fault.of(
            "config/sections.py",
            "test_seeds.py::test_the_released_class_order_follows_the_seed",
            (
                "data: the released order does not follow the run's seed",
                'cut = {"class": released} |',
                'cut = {"class": False} |',
            ),
            (
                "data: the run's seed overrides that of the scenario",
                'cut.get(scenario.get("name"), False) and "seed" not in scenario',
                'cut.get(scenario.get("name"), False)',
            ),
        ),
        *fault.of(
            "data/splits.py",
            "test_sources.py::test_validation_is_stratified_seeded_and_apart_from_test",
            (
                "data: validation rows stay in the train split",
                "return take(train, np.flatnonzero(~mask)), take(",
                "return train, take(",
            ),
            (
                "data: the test split is not cut to the classes",
                "test=cut(dataset.test),",
                "test=dataset.test,",
                "test_stream.py::test_chosen_classes_are_cut_out_of_every_split",
            ),
            (
                "data: chosen classes keep their numbers",
                "part._replace(label=renumbered[part.label])",
                "part",
                "test_stream.py::test_chosen_classes_are_cut_out_of_every_split",
            ),
        ),
        *fault.of(
            "data/toys.py",
            "test_sources.py::test_looks_of_digits_are_domains_of_the_same_split",
            (
                "data: looks of digits are one domain",
                "np.arange(len(looks), dtype=np.int32), count",
                "np.zeros(len(looks), np.int32), count",
            ),
            (
                "data: digits of several looks have the labels of others",
                "np.tile(examples.label, len(looks))",
                "np.repeat(examples.label, len(looks))",
            ),
            (
                "data: rotated digits turn to the right",
                "axes=(1, 2)",
                "axes=(2, 1)",
            ),
            (
                "data: inverted digits are as they were",
                "lambda images: 255 - images",
                "lambda images: images",
            ),
            (
                "data: test digits are of the first look alone",
                "test=_in_looks(data.test, looks)",
                "test=data.test",
            ),
        ),
        *fault.of(
            "augment/crops.py",
            "test_augment.py::test_random_resized_crop_is_pillows_crop_then_resize",
            (
                "data: shrinking has no antialiasing",
                "jnp.maximum(scale, 1.0)",
                "jnp.minimum(scale, 1.0)",
            ),
            (
                "data: crops swap width and height",
                "w = jnp.round(jnp.sqrt(area * aspect))\n"
                "    h = jnp.round(jnp.sqrt(area / aspect))",
                "h = jnp.round(jnp.sqrt(area * aspect))\n"
                "    w = jnp.round(jnp.sqrt(area / aspect))",
                "test_augment.py::test_boxes_are_distributed_as_torchvisions",
            ),
            (
                "data: crops begin at the top",
                "jnp.floor(u[-2] * (height - h + 1))",
                "jnp.floor(0 * (height - h + 1))",
                "test_augment.py::test_boxes_are_distributed_as_torchvisions",
            ),
        ),
        *fault.of(
            "augment/images.py",
            "test_augment.py::test_a_gpu_takes_views_at_once_and_its_slots_are_no_loop",
            (
                "data: on a GPU views have the key of their image",
                "jax.vmap(view_keys, (None, 0), 1)(keys, jnp.arange(views))",
                "jax.vmap(view_keys, (None, 0), 1)(keys, 0 * jnp.arange(views))",
            ),
            (
                "data: on a GPU slots of the jitter are a loop",
                "jax.lax.scan(slot, list(planes), slots, unroll=apart)",
                "jax.lax.scan(slot, list(planes), slots)",
            ),
            (
                "data: on a GPU all views are of the first",
                "jax.tree.map(lambda x, i=i: x[:, i], found)",
                "jax.tree.map(lambda x, i=i: x[:, 0], found)",
            ),
            slow=True,
        ),
        *fault.of(
            "augment/images.py",
            "test_augment.py::test_default_views_are_those_of_the_published_recipe",
            (
                "data: saturation is jittered as strongly as contrast",
                "_JITTER = (0.4, 0.4, 0.2, 0.1)",
                "_JITTER = (0.4, 0.4, 0.4, 0.1)",
            ),
            (
                "data: views are gray half as often",
                "grayscale: schema.Share = 0.2,",
                "grayscale: schema.Share = 0.1,",
            ),
            (
                "data: both views are the same",
                "jax.vmap(jax.random.fold_in, (0, None))(keys, view)",
                "jax.vmap(jax.random.fold_in, (0, None))(keys, 0)",
                "test_augment.py::test_keys_are_folded_from_position_then_view",
            ),
            (
                "data: solarising inverts the dark pixels",
                "jnp.where(image >= threshold, 1.0 - image, image)",
                "jnp.where(image < threshold, 1.0 - image, image)",
                "test_augment.py::test_gray_solarize_flip_normalize",
            ),
        ),
    ],
    *[
        *fault.of(
            "run/job.py",
            "test_core.py::test_a_task_begins_where_the_run_stands",
            (
                "run: a task's start is not noted",
                '"task_start": np.int32(state.step)',
                '"task_start": np.int32(state.task_start)',
            ),
            (
                "run: a task's steps are those of one epoch",
                "np.int32(len(schedule(job, source, task.index)))",
                "np.int32(schedule(job, source, task.index).steps_per_epoch)",
            ),
            (
                "run: images of the set lie as they are shown",
                "jax.ShapeDtypeStruct((len(images), size + filled), images.dtype)",
                "jax.ShapeDtypeStruct(images.shape, images.dtype)",
                "test_layouts.py::"
                "test_a_step_gets_the_images_of_its_rows_which_lie_flat[cpu]",
            ),
            (
                "run: rows of images are no whole tiles of a TPU",
                '-size % _TILE if sharding.platform() == "tpu" else 0',
                "0",
                "test_layouts.py::"
                "test_a_step_gets_the_images_of_its_rows_which_lie_flat[tpu]",
            ),
            (
                "run: labelled batches come in the order of the task's",
                "seed = job.seed + (_LABELLED << 32)",
                "seed = job.seed",
                "test_online_head.py::test_labelled_rows_of_a_joint_task_differ_from_its_own",
            ),
            (
                "run: the method is not told of a task's beginning",
                "sharding.settle(job.method.begin_task(state, task), job.mesh)",
                "sharding.settle(state, job.mesh)",
            ),
        ),
        *fault.of(
            "run/train.py",
            "test_methods.py::test_resumes_bitwise_finite_one_compile[er]",
            (
                "run: a resumed task begins with its first batch",
                "work, source, task.index, step - begun)",
                "work, source, task.index, 0)",
            ),
            (
                "run: a resumed task begins anew",
                'if phase == "evaluated":\n                state = job.begin',
                'if phase != "trained":\n                state = job.begin',
            ),
            (
                "run: a task that has ended ends again on resuming",
                'if phase != "trained":',
                "if True:",
                "test_importance.py::test_a_run_consolidates_at_the_end_of_each_task",
            ),
            (
                "run: the end of a task and its last step have one checkpoint",
                ' + (phase == "trained")',
                "",
                "test_importance.py::test_a_run_consolidates_at_the_end_of_each_task",
            ),
            (
                "run: the end of a task is not told",
                "state = work.method.end_task(state, task)",
                "state = state",
                "test_importance.py::test_a_run_consolidates_at_the_end_of_each_task",
            ),
        ),
        *fault.of(
            "data/storage.py",
            "test_storage.py",
            (
                "run: a file is written in place",
                'draft = f"{target}.{uuid.uuid4().hex}.tmp"',
                "draft = target",
            ),
            (
                "run: a draft that failed stays",
                "                os.unlink(draft)",
                "                pass",
            ),
            (
                "run: a full disk does not say where",
                "reason, os.fspath(path)) from",
                "reason) from",
            ),
        ),
        *fault.of(
            "run/checkpoint.py",
            "test_checkpoint.py::test_restores_every_type_bitwise_on_another_mesh",
            (
                "run: a key is not restored",
                "return Restored(state, cursor",
                'return Restored({**state, "key": like["key"]}, cursor',
            ),
            (
                "run: the oldest checkpoint is restored",
                "for number in reversed(numbers):",
                "for number in numbers:",
                "test_checkpoint.py::test_damaged_newest_falls_back_and_says_so[flip]",
            ),
            (
                "run: a checkpoint of another state is called damaged",
                "except Misfit:\n            raise\n        except Exception",
                "except Exception",
                "test_checkpoint.py::test_another_state_is_told_leaf_by_leaf_and_stays",
            ),
            (
                "run: the cause of an error of Orbax's is not looked at",
                "error = error.__cause__ or error.__context__",
                "error = None",
                "test_checkpoint.py::test_storage_that_does_not_answer_is_no_damage",
            ),
            (
                "run: a missing file is taken for storage that does not answer",
                "if isinstance(error, OSError | MemoryError) and not absent:",
                "if isinstance(error, OSError | MemoryError):",
                "test_checkpoint.py::test_a_missing_file_is_damage",
            ),
            (
                "run: the checksums of some leaves are those of others",
                "for x in names if x in saved.tree]",
                "for x in sorted(names) if x in saved.tree]",
                "test_transfer.py::test_the_trained_encoder_is_judged_and_left_alone[1]",
            ),
            (
                "run: a checksum does not see a swap",
                "weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1",
                "weights = jnp.ones(words.size, jnp.uint32)",
                "test_checkpoint.py::test_checksum_sees_one_bit_and_a_swap",
            ),
        ),
    ],
    *fault.of(
        "data/fetch.py",
        "test_fetch.py",
        (
            "fetch: any file is the published one",
            "if (size, found) == (archive.size, archive.sha256):",
            "if size == archive.size:",
            "test_fetch.py::test_a_file_that_is_not_the_published_one",
        ),
        (
            "fetch: a wrong download stays",
            "    if remove:\n        os.unlink(path)",
            "    if not remove:\n        os.unlink(path)",
            "test_fetch.py::test_a_file_that_is_not_the_published_one",
        ),
        (
            "fetch: a download begins anew each time",
            'request.add_header("Range", f"bytes={have}-")',
            "pass",
            "test_fetch.py::test_a_cut_download_goes_on",
        ),
        (
            "fetch: a server without ranges gives the beginning twice",
            'goes_on = answer.status == 206 and given.startswith(f"bytes {have}-")',
            "goes_on = have > 0",
            "test_fetch.py::test_a_cut_download_goes_on",
        ),
        (
            "fetch: a server may send without end",
            "while left := size - file.tell():",
            "while left := _BLOCK:",
            "test_fetch.py::test_a_file_that_is_not_the_published_one",
        ),
        (
            "fetch: a server that always cuts is asked for ever",
            "for _ in range(TRIES):",
            "while True:",
            "test_fetch.py::test_a_download_that_always_ends_is_given_up",
        ),
        (
            "fetch: one address alone is asked",
            "for url in archive.urls:",
            "for url in archive.urls[:1]:",
            "test_fetch.py::test_a_second_address_is_asked",
        ),
        (
            "fetch: a member leaves the folder",
            'if odd or ".." in parts or',
            "if odd or",
            "test_fetch.py::test_archives_that_hold_something_else",
        ),
        (
            "fetch: links are unpacked",
            "if not (member.isdir() or member.isreg()):",
            "if False:",
            "test_fetch.py::test_archives_that_hold_something_else",
        ),
        (
            "fetch: an archive fills the disk",
            "if total > UNPACKED:",
            "if total < 0:",
            "test_fetch.py::test_archives_that_hold_something_else",
        ),
        (
            "fetch: half a set is left",
            "        shutil.rmtree(draft, ignore_errors=True)\n",
            "",
            "test_fetch.py::test_archives_that_hold_something_else",
        ),
        (
            "fetch: CIFAR-100 gets its coarse labels",
            "raw[:, label_bytes - 1]",
            "raw[:, 0]",
            "test_fetch.py::test_cifar_from_a_server",
        ),
        (
            "fetch: rows of CIFAR's images are its columns",
            ".transpose(0, 2, 3, 1)\n        return",
            ".transpose(0, 3, 2, 1)\n        return",
            "test_fetch.py::test_cifar_from_a_server",
        ),
        (
            "fetch: MNIST's test labels are those of train",
            "((train, *paths[:2]), (test, *paths[2:]))",
            "((train, *paths[:2]), (test, paths[2], paths[1]))",
            "test_fetch.py::test_mnist_from_a_folder",
        ),
        (
            "fetch: no word of what to do without a network",
            'raise Unreachable(f"{error}\\n{_by_hand(name, out)}") from error',
            "raise",
            "test_fetch.py::test_no_network_says_what_to_do_by_hand",
        ),
    ),
    *fault.of(
        "data/splits.py",
        "test_huggingface.py::test_a_share_is_held_out_where_there_is_no_test_split",
        (
            "splits: images without a label are held out to judge",
            "mask = drawn(whole, fraction, [seed, 2]) & (whole.label >= 0)",
            "mask = drawn(whole, fraction, [seed, 2])",
        ),
    ),
    *fault.of(
        "data/from_huggingface.py",
        "test_huggingface.py",
        (
            "huggingface: a split without labels judges",
            'if known.dtype.kind == "U" or (known >= 0).any():',
            "if len(known):",
            "test_huggingface.py::test_columns_of_other_names_are_found",
        ),
        (
            "huggingface: lists of numbers are images",
            "return _holds_images(kind) and not flat",
            "return _holds_images(kind)",
            "test_huggingface.py::test_columns_of_other_names_are_found",
        ),
        (
            "huggingface: a stray Parquet file makes a folder of images a set",
            "if any(name.lower().endswith(files_lib.EXTENSIONS) for name in names):",
            "if False:",
            "test_huggingface.py::test_a_folder_of_images_is_none",
        ),
        (
            "huggingface: offsets are not looked at",
            "found.validate(full=True)",
            "found.validate()",
            "test_huggingface.py::test_offsets_that_lead_out_of_the_file",
        ),
        (
            "huggingface: a state may name any file",
            'schema.check_value(names, list[splits.Inside], f"{file}: filename")',
            'schema.check_value(names, list[str], f"{file}: filename")',
            "test_huggingface.py::test_a_state_that_names_other_files",
        ),
        (
            "huggingface: a split may lie in any folder",
            'schema.check_value(names, list[splits.Inside], f"{listed}: splits")',
            'schema.check_value(names, list[str], f"{listed}: splits")',
            "test_huggingface.py::test_splits_outside_of_the_folder",
        ),
        (
            "huggingface: the rows of the second file are those of the first",
            "np.full(rows, number)",
            "np.full(rows, 0)",
            "test_huggingface.py::test_arrow_files",
        ),
        (
            "huggingface: labels above int32 wrap around",
            "if len(label) and not -1 <=",
            "if len(label) and not -(10**18) <=",
            "test_huggingface.py::test_labels_that_are_none",
        ),
        (
            "huggingface: pixels wrap around",
            'array.dtype.kind not in "iu" or array.min() < 0',
            'array.dtype.kind not in "iu"',
            "test_huggingface.py::test_images_that_are_none",
        ),
        (
            "huggingface: the limit of pixels is passed over",
            "if not 0 < array.shape[0] * array.shape[1] <= max_pixels:",
            "if not array.size:",
            "test_huggingface.py::test_images_that_are_none",
        ),
        (
            "huggingface: a missing label is the first class",
            "fill_null(-1)",
            "fill_null(0)",
            "test_huggingface.py::test_labels_of_every_kind",
        ),
        (
            "huggingface: ragged lists are cut into images",
            "if values.null_count or len(lengths) != 1:",
            "if values.null_count:",
            "test_huggingface.py::test_images_that_are_none",
        ),
        (
            "huggingface: classes of the test split have numbers of their own",
            "names, tables = _numbered(tables, files, label_key)",
            "names, tables = _numbered(tables, files[:1], label_key)",
            "test_huggingface.py::test_files_that_number_their_classes_otherwise",
        ),
        (
            "huggingface: labels that were mended are those from before",
            "    _column.cache_clear()  # the set may have been written anew\n"
            "    decoder",
            "    decoder",
            "test_huggingface.py::test_a_set_that_is_written_anew_is_read_anew",
        ),
        (
            "huggingface: a split that lost its labels judges",
            "    _column.cache_clear()  # the set may have been written anew\n"
            "    found =",
            "    found =",
            "test_huggingface.py::test_a_set_that_is_written_anew_is_read_anew",
        ),
        (
            "huggingface: sets in folders side by side are mixed",
            "if len(folders) > 1:",
            "if not folders:",
            "test_huggingface.py::test_several_sets_in_a_folder_are_not_mixed",
        ),
        (
            "huggingface: a number in one file is a text in another",
            "if len({part.label.dtype.kind for part in parts}) > 1:",
            "if not parts:",
            "test_huggingface.py::test_files_that_number_their_classes_otherwise",
        ),
        (
            "huggingface: a cache is not told of another column",
            'hashlib.sha256("\\0".join([self.key, *names]).encode())',
            'hashlib.sha256("\\0".join(names).encode())',
            "test_huggingface.py::test_a_cache_knows_its_column",
        ),
    ),
    *fault.of(
        "data/splits.py",
        "test_hostile_data.py::test_a_meta_json_of_other_types",
        (
            "data: meta.json may name files elsewhere",
            r"(?![/\\])(?!(.*[/\\])?\.\.([/\\]|$))[^\0]+",
            r"[^\0]+",
        ),
    ),
    *fault.of(
        "data/splits.py",
        "test_sources.py::test_a_part_of_a_set_is_converted",
        (
            "data: domains of a part keep their numbers",
            "return part._replace(domain=renumbered[part.domain])",
            "return part",
        ),
    ),
    *fault.of(
        "data/convert.py",
        "test_sources.py::test_a_part_of_a_set_is_converted",
        (
            "data: a span has its first number alone",
            "entries += range(*map(int, span.groups()))",
            "entries += [int(span[1])]",
        ),
        (
            "data: half a converted set is left",
            "            path.unlink()\n",
            "            pass\n",
            "test_sources.py::test_a_conversion_that_fails_leaves_an_empty_folder",
        ),
        (
            "data: rows of a part are always the same draw",
            "classes, per_class, seed)",
            "classes, per_class, 0)",
        ),
    ),
    *fault.of(
        "data/storage.py",
        "test_storage.py::test_hidden_folders_hold_no_images",
        (
            "data: thumbnails in hidden folders are images",
            'if entry.name[0] == ".":',
            'if entry.name == ".":',
        ),
        (
            "data: hidden folders of a bucket hold images",
            'if "/." not in x[start:]',
            'if "/." not in "x"',
        ),
    ),
    *fault.of(
        "data/cache.py",
        "test_cache.py::test_every_file_is_on_the_disk_before_the_folder_has_its_name",
        (
            "cache: offsets may be lost in a power cut",
            'with storage.replacing(os.path.join(part, f"{name}.npy")) as rows:',
            'with open(os.path.join(part, f"{name}.npy"), "wb") as rows:',
        ),
    ),
]
