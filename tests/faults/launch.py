"""Faults of the scripts that start runs."""

from faults import fault

_SWEEP = "launch/sweep.py"
_TABLE = "launch/online_table.py"
_GROWS = "test_launch_online.py::test_finished_runs_are_kept_and_the_table_grows"
_ICL = "launch/icl_table.py"
_FRESH = "launch/keep_fresh.py"
_KEPT = (
    "test_launch_keep_fresh.py"
    "::test_what_is_done_is_kept_and_each_row_begins_with_the_encoder"
)

FAULTS = [
    fault.Fault(
        "launch: a finished run is trained again",
        _SWEEP,
        "[run for run in runs if not done(run)]",
        "[*runs]",
        (_GROWS,),
    ),
    fault.Fault(
        "launch: the table is written before the first run and never again",
        _SWEEP,
        "run_all(left, options, ended=write)",
        "run_all(left, options)",
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
    fault.Fault(
        "launch: the encoder is judged after the first of several updates",
        _FRESH,
        "updates(options, folder)[-1]",
        "updates(options, folder)[0]",
        ("test_launch_keep_fresh.py::test_several_sets_are_taught_one_after_another",),
    ),
    fault.Fault(
        "launch: ways to teach an encoder are compared without pairs of seeds",
        _FRESH,
        "for seed in both]",
        "for seed in rows[title]]",
        ("test_launch_keep_fresh.py::test_differences_are_paired_by_seed",),
    ),
    fault.Fault(
        "launch: a row of ICL is done when its first seed is",
        _ICL,
        "return all(map(sweep.finished, places(run, options)))",
        "return sweep.finished(places(run, options)[0])",
        ("test_launch_icl.py::test_a_row_is_done_when_all_its_seeds_are",),
    ),
    fault.Fault(
        "launch: rows of ICL begin with the encoder of the first growth",
        _ICL,
        "runs[growth, OLD].folder)",
        "runs[options.growths[0], OLD].folder)",
        (
            "test_launch_icl.py"
            "::test_every_row_begins_with_the_old_encoders_of_its_growth",
        ),
    ),
    fault.Fault(
        "launch: a seed of ICL without its retraining is compared",
        _ICL,
        "for x in (name, BASELINE, FROZEN)",
        "for x in (name, FROZEN)",
        (
            "test_launch_icl.py"
            "::test_seeds_that_lack_what_others_are_compared_with_wait",
        ),
    ),
    fault.Fault(
        "launch: sets of one name end in a traceback",
        _FRESH,
        "    except ValueError as error:",
        "    except KeyError as error:",
        ("test_launch_keep_fresh.py::test_several_sets_are_taught_one_after_another",),
    ),
]
