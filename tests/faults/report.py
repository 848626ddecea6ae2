"""Faults of pages and tables about runs, and of budgets."""

from faults import fault

FAULTS = [
    *fault.of(
        "plots/canvas.py",
        "test_plots.py::test_a_picture_is_written_in_every_format_that_is_asked_for",
        (
            "plots: formats hold for ever",
            "        _in_place.reset(token)",
            "        pass",
        ),
        (
            "plots: other formats have the ending of the first",
            "name if kind == own else name[: -len(own)] + kind",
            "name",
        ),
    ),
    *fault.of(
        "run/transfer.py",
        "test_plots.py::test_an_encoder_that_is_judged_has_its_pictures_in_them",
        (
            "plots: of an encoder that is judged there are PNG alone",
            "with plots.written_as(work.plot_formats):",
            "with plots.written_as(()):",
        ),
    ),
    *(
        each
        for file in ("run/train.py", "run/finish.py")
        for each in fault.of(
            file,
            "test_plots.py::test_a_run_writes_all_its_pictures_in_its_formats",
            (
                f"plots: what {file} draws is PNG alone",
                "with plots.written_as(work.plot_formats):",
                "with plots.written_as(()):",
            ),
            slow=True,
        )
    ),
    *fault.of(
        "report/alike.py",
        "test_compare.py",
        (
            "alike: a seed is a difference",
            '_ASIDE = {"seed", "cache",',
            '_ASIDE = {"cache",',
        ),
        (
            "alike: options of other functions are compared",
            'names = ["name"]',
            "pass",
        ),
        (
            "alike: a default that is written out is a difference",
            "(run.resolved if whole else run.asked)",
            "run.asked",
        ),
        (
            "alike: an evaluator that one run has is a difference",
            "{run: own[key] for run, own in judges.items() if key in own}",
            "{run: own.get(key, {}) for run, own in judges.items()}",
        ),
    ),
    *fault.of(
        "report/page.py",
        "test_report.py::test_a_banner_says_what_runs_were_not_measured_alike_in",
        (
            "report: runs of other data are shown side by side in silence",
            "alike.differences({run.name: run.run.configs for run in runs})",
            "[]",
        ),
    ),
    *fault.of(
        "plots/svg.py",
        "test_report.py::test_lines_have_gaps_and_wide_bands_are_cut",
        (
            "report: a band is not cut",
            "low = max(low - room, min(low, float(np.min(bounds))))",
            "low = min(low, float(np.min(bounds)))",
        ),
        (
            "report: positions are counted from below",
            "corners[1] = height - corners[1]",
            "corners[1] = corners[1]",
            "test_report.py::test_numbers_stand_where_the_axes_have_them",
        ),
        (
            "report: a logarithmic axis is read as linear",
            'int(axes.get_yscale() == "log")',
            'int(axes.get_yscale() == "none")',
            "test_report.py::test_numbers_stand_where_the_axes_have_them",
        ),
        (
            "report: markers of two charts have the same id",
            '"svg.hashsalt": key,',
            '"svg.hashsalt": "x",',
            "test_report.py::test_pages_of_the_same_runs_are_the_same_and_no_name_"
            "is_there_twice",
        ),
        (
            "report: points are left out of a line",
            '"path.simplify": False}',
            '"path.simplify": True}',
            "test_report.py::test_a_line_has_all_its_points",
        ),
    ),
    *fault.of(
        "report/compare.py",
        "test_compare.py::test_along_the_stream_every_evaluation_counts",
        (
            "report: along the stream the last evaluation alone counts",
            "float(np.mean([*own]))",
            "float([*own][-1])",
        ),
        (
            "report: the cost of an image is that of a step",
            'x["flops"] / x["images"]',
            'x["flops"] / x["steps"]',
            "test_compare.py::test_cost_of_a_step",
        ),
    ),
    *fault.of(
        "config/budget.py",
        "test_budget.py::test_the_most_updates_that_are_paid_for",
        (
            "budget: the first update is paid for twice",
            "return 1 + int((allowed - one) // (two - one))",
            "return int((allowed - one) // (two - one))",
        ),
        (
            "budget: what the batch costs without updates counts in each",
            "// (two - one))",
            "// one)",
        ),
    ),
    *fault.of(
        "config/build.py",
        "test_budget.py::test_a_job_makes_as_many_updates_as_its_budget_pays_for",
        (
            "budget: the method stays as it was",
            "made = made._replace(method=method, replay=parts.replay)",
            "made = made._replace(replay=parts.replay)",
        ),
        slow=True,
    ),
    *fault.of(
        "report/page.py",
        "test_report.py::test_nothing_that_comes_from_files_becomes_markup",
        (
            "report: text is not escaped",
            "autoescape=True,",
            "autoescape=False,",
        ),
    ),
    *fault.of(
        "plots/canvas.py",
        "test_report.py::test_runs_differ_in_colour_and_in_marker_or_dash",
        (
            "report: markers change with the colours alone",
            "marker = MARKERS[number % len(MARKERS)]",
            "marker = MARKERS[number // len(COLOURS) % len(MARKERS)]",
        ),
    ),
    *fault.of(
        "plots/canvas.py",
        "test_plots.py",
        (
            "plots: every picture is a PNG",
            "figure.savefig(picture, format=kind,",
            'figure.savefig(picture, format="png",',
        ),
        (
            "plots: a picture has the time of day in it",
            '"metadata": _UNDATED[kind]',
            '"metadata": {}',
        ),
    ),
    *fault.of(
        "plots/runs.py",
        "test_record.py",
        (
            "plots: the colours of all accuracies are from 0 to 100",
            "axes.imshow(100 * matrix, vmin=low, vmax=high,",
            "axes.imshow(100 * matrix, vmin=0, vmax=100,",
            "test_record.py::test_the_scale_shows_differences",
        ),
        (
            "plots: what is not measured is blank",
            'edgecolor="0.8", hatch="//")',
            'edgecolor="0.8")',
            "test_record.py::test_heat_map_brightens_with_the_value_and_hatches_what_is_nan",
        ),
    ),
    *fault.of(
        "report/compare.py",
        "test_compare.py::test_runs_of_one_name_are_told_apart",
        (
            "compare: of runs of one name the last is shown",
            "level(read(workdir))._replace(name=name)",
            "level(read(workdir))",
        ),
        (
            "compare: seeds that are behind count as if they were over",
            "if count == most]",
            "]",
            "test_compare.py::test_seeds_that_are_behind_are_left_out_and_named",
        ),
        (
            "compare: a run that goes on is set against one that is over",
            "if comparable(run, runs[0])",
            "if True",
            "test_compare.py::test_runs_after_other_tasks_have_no_difference",
        ),
        (
            "compare: seeds side by side have no rows",
            "if by_seed or run.together is None or",
            "if True or",
            "test_compare.py::test_seeds_side_by_side_have_their_rows_in_common",
        ),
        (
            "compare: seeds side by side all have the rows of the first",
            'seeds.of_one(row["eval"], number)',
            'seeds.of_one(row["eval"], 0)',
            "test_compare.py::test_seeds_side_by_side_have_their_rows_in_common",
        ),
        (
            "compare: a run without rows has a traceback",
            "if (folder / record.ROWS).exists()",
            "if True",
            "test_compare.py"
            "::test_without_logged_rows_there_is_no_mean_along_the_stream",
        ),
        (
            "compare: a format is refused when all is read",
            "plots.format_of(options.out)",
            "pass",
            "test_compare.py"
            "::test_a_picture_of_another_format_is_refused_before_anything_is_read",
        ),
    ),
    *fault.of(
        "report/speedup.py",
        "test_speedup.py::test_refuses_runs_that_lack_something",
        (
            "speedup: a format is refused when all is read",
            "canvas.format_of(options.plot)",
            "pass",
        ),
    ),
    *fault.of(
        "report/speedup.py",
        "test_speedup.py::test_names_are_no_maths",
        (
            "speedup: a name is maths",
            "label=canvas.escaped(name)",
            "label=name",
        ),
        slow=True,
    ),
    *fault.of(
        "plots/methods.py",
        "test_plots.py::test_a_name_is_no_maths",
        (
            "plots: the name of a method is maths",
            "np.arange(1, size + 1), canvas.short(name)",
            "np.arange(1, size + 1), name",
        ),
        slow=True,
    ),
    *fault.of(
        "plots/methods.py",
        "test_plots.py::test_methods_are_rows_the_best_on_top",
        (
            "plots: methods are in order of their names",
            "key=lambda named: max(named[1].mean)",
            "key=lambda named: named[0]",
        ),
        (
            "plots: all budgets have one colour",
            "style = canvas.style_of(budgets.index(budget)) | shape",
            "style = canvas.style_of(0) | shape",
        ),
        (
            "plots: a control looks like a method",
            'shape |= {"mfc": "white", "markersize": 5} if',
            "shape |= {} if",
        ),
    ),
]
