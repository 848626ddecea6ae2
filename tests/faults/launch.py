"""Faults of the scripts that start runs."""

from faults import fault

_TABLE = "launch/online_table.py"
_GROWS = "test_launch_online.py::test_finished_runs_are_kept_and_the_table_grows"
_FRESH = "launch/keep_fresh.py"
_KEPT = (
    "test_launch_keep_fresh.py"
    "::test_what_is_done_is_kept_and_each_row_begins_with_the_encoder"
)

FAULTS = [
    fault.Fault(
        "launch: a finished run is trained again",
        _TABLE,
        "if not sweep.finished(run.folder)]",
        "if run.folder]",
        (_GROWS,),
    ),
    fault.Fault(
        "launch: the table is written before the first run and never again",
        _TABLE,
        "sweep.run_all(left, options, ended=write)",
        "sweep.run_all(left, options)",
        (_GROWS,),
    ),
    fault.Fault(
        "launch: rows of all seeds before the next row",
        _TABLE,
        "for of_seed in zip(*runs.values(), strict=True) for run in of_seed",
        "for of_row in runs.values() for run in of_row",
        (
            "test_launch_online.py"
            "::test_each_row_is_run_with_each_memory_one_seed_after_another",
        ),
    ),
    fault.Fault(
        "launch: milliseconds are of the slowest run",
        _TABLE,
        'f"{min(steps):.0f}"',
        'f"{max(steps):.0f}"',
        ("test_launch_online.py::test_a_line_by_hand",),
    ),
    fault.Fault(
        "launch: an update without its own copy of the encoder",
        _FRESH,
        "shutil.copytree(*step.wants)",
        "step.wants[1].mkdir(parents=True)",
        (_KEPT,),
    ),
    fault.Fault(
        "launch: a step that failed does not end the script",
        _FRESH,
        "            return code\n        (root",
        "        (root",
        (_KEPT,),
    ),
    fault.Fault(
        "launch: an update passes where it loses more than the limit",
        _FRESH,
        "change >= -DROP for",
        "change <= DROP for",
        ("test_launch_keep_fresh.py::test_a_line_by_hand",),
    ),
]
