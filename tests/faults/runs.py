"""Faults of what keeps a run whole: locks, signals, damaged files."""

from faults import fault

FAULTS = [
    *fault.of(
        "run/lock.py",
        "test_lock.py",
        (
            "lock: a live process is taken over from",
            'if _started(int(owner["pid"])) == owner.get("started"):',
            "if False:",
        ),
        (
            "lock: a number that was given again counts as the process",
            'if _started(int(owner["pid"])) == owner.get("started"):',
            'if _started(int(owner["pid"])):',
        ),
        (
            "lock: another machine's is taken over",
            'here = owner["boot"] == mine["boot"] if known else same_host',
            "here = True",
        ),
        (
            "lock: any job is one's own",
            'elif owner.get("job") and owner["job"] == mine["job"]:',
            'elif owner.get("job"):',
        ),
        (
            "lock: nobody locks the file",
            "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            "        pass\n",
            "test_lock.py::test_the_system_keeps_a_process_out_whatever_the_file_says",
        ),
        (
            "lock: the file stays",
            "                self._path.unlink()",
            "                pass",
        ),
        (
            "lock: another's file is removed",
            "if self.is_there():",
            "if True:",
        ),
        (
            "lock: the other processes do not hear of a refusal",
            "if sharding.any_process(failure is not None):",
            "if failure is not None:",
        ),
        (
            "lock: an object replaces the one that is there",
            'files.pipe_file(name, data, mode="create")',
            "files.pipe_file(name, data)",
            "test_buckets.py"
            "::test_a_bucket_has_one_owner_by_the_condition_that_there_is_none",
        ),
    ),
    *fault.of(
        "run/train.py",
        "test_stops.py",
        (
            "stops: a run does not lock its directory",
            "        stack.enter_context(lock.held(workdir))\n",
            "",
            "test_lock.py::test_what_writes_to_a_directory_asks_for_its_lock",
        ),
        (
            "stops: an evaluation that was cut off is not made up for",
            'if resumed.get("owed"):',
            "if False:",
        ),
        (
            "stops: a directory that is gone is written to again",
            "        lock.check(loop.workdir)\n",
            "",
        ),
        (
            "stops: a state that is not finite is judged",
            "        metrics_log.check_state(state, step)\n        _evaluate(",
            "        _evaluate(",
        ),
        (
            "stops: nobody compares the rows with their checksum",
            'checksum=cursor.get("log"),',
            "checksum=None,",
        ),
    ),
    *fault.of(
        "run/metrics_log.py",
        "test_stops.py::test_a_state_with_a_number_that_is_none_is_not_used",
        (
            "stops: the parameters alone are looked at",
            "named = jax.tree_util.tree_flatten_with_path(state)[0]",
            "named = jax.tree_util.tree_flatten_with_path(state.params)[0]",
        ),
    ),
    *fault.of(
        "run/record.py",
        "test_stops.py",
        (
            "record: a row may be anything",
            "if not isinstance(row, dict):",
            "if row is None:",
        ),
        (
            "record: rows that are damaged are kept",
            "kept = [line for line in lines if _row(line) is not None]",
            "kept = lines",
        ),
    ),
    *fault.of(
        "run/record.py",
        "test_record.py::test_the_time_left_is_said_once_steps_were_timed",
        (
            "record: three steps of a moment say how long a run takes",
            "_TIMED_SECONDS = 2.0",
            "_TIMED_SECONDS = 0.0",
        ),
        (
            "record: the time that is left is said at every step",
            "self._told = True",
            "self._told = False",
        ),
    ),
    *fault.of(
        "run/headline.py",
        "test_headline.py",
        (
            "headline: rows of several tasks count twice",
            "rows = np.unique(np.concatenate(",
            "rows = np.sort(np.concatenate(",
        ),
        (
            "headline: tasks that are not trained have steps",
            "job.plain_schedules(work)[done : work.first_tasks]",
            "job.plain_schedules(work)[done:]",
        ),
        (
            "headline: an update has the steps of the run before it, too",
            "job.plain_schedules(work)[done : work.first_tasks]",
            "job.plain_schedules(work)[: work.first_tasks]",
        ),
    ),
    *fault.of(
        "run/finish.py",
        "test_plasticity.py"
        "::test_a_run_that_goes_on_from_another_is_set_against_fresh_ones",
        (
            "alone: a task begins with what another run has trained",
            "        start=None,  # not",
            "        # not",
        ),
        (
            "alone: tasks that the run leaves out are trained",
            "enumerate(tasks[: work.first_tasks])",
            "enumerate(tasks)",
        ),
        slow=True,
    ),
    *fault.of(
        "run/finish.py",
        "test_headline.py::test_a_run_says_first_what_it_is",
        (
            "headline: each seed says what the first did",
            "results[seed] = _one(own, place, stop, step)",
            "results[seed] = run(own, place, stop=stop, step=step)",
        ),
        slow=True,
    ),
    *fault.of(
        "run/seeds.py",
        "test_seeds.py::test_all_ways_to_take_the_steps_of_seeds_agree",
        (
            "seeds: a TPU maps convolutions over any number of seeds",
            "len(jobs) > _MAPPED",
            "False",
        ),
    ),
    *fault.of(
        "run/cost.py",
        "test_cost.py::test_of_forms_for_several_chips_that_of_a_cpu_counts",
        (
            "cost: loops of other chips count",
            'if platforms := options.get("branches_platforms"):',
            "if platforms := ():",
        ),
    ),
    *fault.of(
        "run/checkpoint.py",
        "test_checkpoint.py::test_a_cursor_with_another_digit_is_damage",
        (
            "checkpoint: a cursor is not compared with its checksum",
            'if own.get("cursor_checksum", _text_sum(own["cursor"])) != '
            '_text_sum(own["cursor"]):',
            "if False:",
        ),
    ),
    *fault.of(
        "config/claim.py",
        "test_lock.py::test_what_writes_to_a_directory_asks_for_its_lock",
        (
            "lock: a config is written beside a run",
            "    with lock.held(workdir):\n        _claim(",
            "    if workdir:\n        _claim(",
        ),
        (
            "resolved: what a run computed with is written again",
            "_tell_moved(path.parent / resolved.RESOLVED, every_option)",
            "storage.write_json(path.parent / resolved.RESOLVED, every_option)",
            "test_resolved.py::test_a_run_resumes_by_what_was_asked",
        ),
        (
            "resolved: another machine is another version",
            "schema.differences(without(then, MACHINE), without(now, MACHINE))",
            "schema.differences(then, now)",
            "test_resolved.py::test_a_run_resumes_by_what_was_asked",
        ),
    ),
    *fault.of(
        "config/build.py",
        "test_build.py::test_auto_is_what_the_devices_want_and_a_run_keeps_it",
        (
            "config: a run does not keep the precision that it began with",
            'if "precision" in begun:',
            'if "precision" in ():',
        ),
    ),
    *fault.of(
        "config/build.py",
        "test_scaling.py::test_seeds_are_planned_as_a_run_takes_them",
        (
            "plan: seeds that go one after another are compiled together",
            "    if not how:\n        return work\n",
            "",
        ),
        (
            "plan: a memory in shards goes side by side",
            "return not (split or mixes or sharding.on_cpu())",
            "return not (mixes or sharding.on_cpu())",
        ),
        (
            "plan: seeds start from 0",
            "chosen = range(top.seed, top.seed + top.seeds)",
            "chosen = range(top.seeds)",
        ),
    ),
    *fault.of(
        "scaling/compiled.py",
        "test_scaling.py::test_what_is_told_of_seeds_side_by_side_is_of_all",
        (
            "scaling: seeds are not counted",
            '"seeds": max(len(work.together), 1),',
            '"seeds": 1,',
        ),
    ),
    *fault.of(
        "config/resolved.py",
        "test_resolved.py",
        (
            "resolved: None stays None",
            "stands_for=stands.get(name, values[name]),",
            "stands_for=values[name],",
        ),
        (
            "resolved: what an entry of an evaluator leaves out is lost",
            "if option.stands_for is not NONE",
            "if option.asked",
        ),
        (
            "resolved: no run's seed cuts its tasks",
            'return {"seed": others.raw.get("seed", 0)} if follows else {}',
            "return {}",
        ),
        (
            "resolved: the size of an encoder says nothing of its widths",
            "net = function(**options)",
            "net = None",
        ),
    ),
    *fault.of(
        "front/shown.py",
        "test_tuning.py::test_the_encoder_that_begins_is_shown_and_where_it_is_from",
        (
            "show: a run begins with the encoder of the config",
            "whole = build.completed(whole)",
            "pass",
        ),
        (
            "show: an encoder that begins is the config's",
            "if name not in asked or asked[name] != taken[name]",
            "if name not in taken",
        ),
    ),
    *fault.of(
        "methods/two_view/networks.py",
        "test_resolved.py::test_none_stands_for_what_the_base_and_the_strategy_have",
        (
            "resolved: a strategy has the weight of the base",
            "base.weight if strategy.weight is None else strategy.weight",
            "base.weight",
        ),
    ),
    *fault.of(
        "sharding.py",
        "test_build.py::test_auto_asks_the_devices_what_they_multiply",
        (
            "config: a CPU computes in bfloat16",
            "return not on_cpu()",
            "return True",
        ),
        (
            "config: a GPU before Ampere computes in bfloat16",
            "return not major.isdigit() or int(major) >= 8",
            "return not major.isdigit() or int(major) >= 7",
        ),
    ),
    *fault.of(
        "evals/knn.py",
        "test_evals.py::test_features_that_are_not_finite_give_no_result_and_a_warning",
        (
            "eval: kNN judges features that are no numbers",
            "if not features_lib.finite(held, bank):",
            "if False:",
        ),
    ),
    *fault.of(
        "evals/predict.py",
        "test_evals.py::test_features_that_are_not_finite_give_no_result_and_a_warning",
        (
            "eval: predictions that are no numbers are class 0",
            "if not sharding.fetch(_usable(scores)):",
            "if False:",
        ),
    ),
    *fault.of(
        "run/evaluation.py",
        "test_evals.py::test_every_result_is_looked_at_for_what_is_no_number",
        (
            "eval: a scalar that is no number passes",
            "if not np.isfinite(value).all()",
            "if False",
        ),
    ),
    *fault.of(
        "run/evaluation.py",
        "test_build.py::"
        "test_entries_have_names_of_their_own_and_may_run_at_the_end_alone",
        (
            "eval: a run says that it draws what waits for the end",
            "if not isinstance(evaluate, _AtTheEnd) or evaluate.due(state, task)",
            "if True",
        ),
        slow=True,
    ),
    *fault.of(
        "export/command.py",
        "test_export.py::test_no_path_of_this_machine_is_in_the_card",
        (
            "export: options that name places stay",
            "local = isinstance(value, str) and (key in _PATHS or "
            "_LOOKS_LOCAL.match(value))",
            "local = isinstance(value, str) and _LOOKS_LOCAL.match(value)",
        ),
    ),
    *fault.of(
        "run/folder.py",
        "test_export.py::test_hostile_headers_are_refused_by_name",
        (
            "export: an array of another library's type is an error of its own",
            "except (SafetensorError, KeyError, ValueError) as error:",
            "except (SafetensorError, ValueError) as error:",
        ),
    ),
    *fault.of(
        "run/signals.py",
        "test_signals.py",
        (
            "signals: a second one waits, too",
            "        _end(128 + number)",
            "        pass",
            "test_signals.py::test_with_work_to_save_the_first_waits_and_says_for_what",
        ),
        (
            "signals: HUP is not asked for",
            '_ALL = ("SIGTERM", "SIGINT", "SIGHUP")',
            '_ALL = ("SIGTERM", "SIGINT")',
            "test_signals.py::test_with_work_to_save_the_first_waits_and_says_for_what",
        ),
        (
            "signals: the process ends before its save has",
            "        work.settle()\n",
            "        pass\n",
        ),
        (
            "signals: one of several processes ends by itself",
            "if work.settle is None or jax.distributed.is_initialized():",
            "if work.settle is None:",
            "test_signals.py::test_processes_that_share_a_run_end_together",
        ),
        (
            "signals: the lock stays",
            "    lock.release_all()\n",
            "",
        ),
    ),
    *fault.of(
        "run/loggers/wandb.py",
        "test_loggers.py::test_a_resumed_run_goes_on_under_its_id",
        (
            "loggers: a resumed run is another one",
            'name = known.get("id") or uuid.uuid4().hex[:12]',
            "name = uuid.uuid4().hex[:12]",
        ),
        (
            "loggers: a resumed run counts its rows from 0",
            "Board(run, len(rows) if known else 0)",
            "Board(run, 0)",
        ),
        (
            "loggers: rows are shown twice after a resume",
            "for row in () if known else rows:",
            "for row in rows:",
        ),
        (
            "loggers: a run without an account is a traceback",
            "except wandb.errors.Error as error:",
            "except ZeroDivisionError as error:",
            "test_loggers.py::test_a_board_that_does_not_begin",
        ),
    ),
    *fault.of(
        "run/record.py",
        "test_loggers.py::test_a_logger_of_the_users_own",
        (
            "loggers: other loggers get no rows",
            "for logger in self._loggers:\n            logger.write(row)",
            "for logger in self._loggers[:0]:\n            logger.write(row)",
        ),
        (
            "loggers: a logger is not closed",
            "for part in (self._bar, *self._loggers, self._rows):",
            "for part in (self._bar, self._rows):",
        ),
    ),
    *fault.of(
        "run/job.py",
        "test_build.py::test_a_call_of_a_task_ends_where_something_is_to_be_done",
        (
            "calls: a task's goes past saves",
            "for number in (job.save_every, job.eval_every) if number]",
            "for number in (job.eval_every,) if number]",
        ),
        (
            "calls: a task's is as long as the shortest task",
            "return min([max(map(len, plans)), *every])",
            "return min([*map(len, plans), *every])",
        ),
        (
            "calls: a task's goes past the ends of epochs",
            "    if job.counts_epochs:\n        every.append(",
            "    if False:\n        every.append(",
        ),
    ),
    *fault.of(
        "run/metrics_log.py",
        "test_build.py::test_a_whole_task_is_one_call",
        (
            "speed: steps that came together took no time",
            "            if logged > before:\n                self._measure(logged)\n",
            "            if logged > before:\n                self._measure(logged)\n"
            "                self._measure(logged)\n",
        ),
        slow=True,
    ),
    *fault.of(
        "config/build.py",
        "test_build.py::test_accelerators_make_a_task_of_an_online_method_one_call",
        (
            "calls: of eight steps, however short they are",
            'asked = 1 if sharding.on_cpu() else "task" if short else 8',
            "asked = 1 if sharding.on_cpu() else 8",
        ),
    ),
    *fault.of(
        "update/lineage.py",
        "test_update.py::test_numbers_are_not_given_again",
        (
            "update: the next number counts those that are left",
            "number += int(earlier[-1].name)",
            "number += len(earlier)",
        ),
        (
            "update: 10000 comes before 9999",
            "return sorted(found, key=lambda path: int(path.name))",
            "return sorted(found)",
        ),
        (
            "update: of several seeds it names one that is not there",
            "seed_{saved.get('seed', 0)}",
            "seed_0",
            "test_update.py::test_of_several_seeds_the_first_is_named",
        ),
        (
            "update: a run on graphs is a KeyError",
            'if saved["augment"].get("name") == "graphs":',
            "if False:",
            "test_update.py::test_a_run_on_graphs_is_refused_in_words",
        ),
    ),
    *fault.of(
        "update/command.py",
        "test_update.py::test_limits_that_no_update_could_keep",
        (
            "update: an accuracy may be in percent",
            "accuracy: schema.Share | None",
            "accuracy: float | None",
        ),
        (
            "update: what gives no accuracy keeps every limit",
            "if not found or None in found.values():",
            "if None in found.values():",
            "test_update.py::test_without_an_accuracy_no_limit_is_kept",
        ),
    ),
    *fault.of(
        "run/transfer.py",
        "test_transfer.py::test_seeds_side_by_side_of_a_config_that_names_none",
        (
            "transfer: seeds that the config does not number are a KeyError",
            'first = config.get("seed", 0)',
            'first = config["seed"]',
        ),
        (
            "transfer: a ConvNeXt has as many channels as there are means",
            'for first in ("conv1", "patch", "stem"):',
            'for first in ("conv1", "patch"):',
            "test_export.py::test_a_convnext_of_colour_that_has_one_mean_for_all_"
            "channels",
        ),
        (
            "transfer: a run on graphs is a KeyError",
            'if run["augment"].get("name") == "graphs":',
            "if False:",
            "test_update.py::test_a_run_on_graphs_is_refused_in_words",
        ),
        (
            "transfer: warnings of pictures are dropped",
            "evaluation.warn(told, key, work.state, 0)",
            "evaluation.warn((), key, work.state, 0)",
            "test_transfer.py::test_pictures_warn_as_evaluators_do",
        ),
    ),
    *fault.of(
        "export/command.py",
        "test_export.py::test_what_is_written_lies_in_the_folder_from_the_start",
        (
            "export: the draft lies beside the folder",
            'draft = folder / f"{uuid.uuid4().hex}.tmp"',
            'draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")',
        ),
        (
            "export: a draft that was left is something else",
            'for path in folder.iterdir() if path.suffix != ".tmp"}',
            "for path in folder.iterdir()}",
        ),
    ),
    *fault.of(
        "config/command.py",
        "test_command.py::test_a_damaged_file_met_on_the_way_is_one_line",
        (
            "command: a damaged file met on the way is a traceback",
            "    storage.NotJson,\n",
            "",
        ),
        (
            "command: what is refused on the way is a traceback",
            "    schema.Refused,\n",
            "",
            "test_seeds.py::test_a_later_seed_that_cannot_be_made_is_one_line",
        ),
    ),
    *fault.of(
        "run/loggers/__init__.py",
        "test_loggers.py::test_a_board_that_does_not_begin",
        (
            "loggers: one that is not installed is found after the data are read",
            "            module.check()\n",
            "            pass\n",
        ),
    ),
    *fault.of(
        "config/build.py",
        "test_seeds.py::test_a_config_without_an_encoder_is_completed_first",
        (
            "seeds: a config lacks the encoder of its start",
            "whole, plain = sections.completed(raw), _plain(raw)",
            "whole, plain = raw, _plain(raw)",
        ),
        (
            "config: data are read before another run's directory is refused",
            "    claim.check(workdir, plain, claim.NOTED)",
            "    assert plain",
            "test_build.py::test_another_config_is_refused_before_data_are_read",
        ),
        (
            "config: what build notes makes another config",
            "claim.check(workdir, plain, claim.NOTED)",
            "claim.check(workdir, plain)",
            "test_build.py::test_another_config_is_refused_before_data_are_read",
        ),
    ),
    *fault.of(
        "run/record.py",
        "test_loggers.py::test_where_a_part_cannot_be_closed_the_others_are",
        (
            "record: a part that cannot be closed leaves the others open",
            "stack.callback(part.close)",
            "part.close()",
        ),
        (
            "record: rows are gone where saving them is cut off",
            "aside.write_bytes(path.read_bytes())",
            "path.rename(aside)",
            "test_record.py::test_rows_stay_where_saving_them_is_cut_off",
        ),
    ),
]
