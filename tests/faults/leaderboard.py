"""Faults of the leaderboard: budgets, the front, advice, the page, what is run."""

from faults import fault

_FILE = "test_leaderboard.py"
_PAYS = f"{_FILE}::test_as_much_as_the_budget_pays_for_and_never_less_than_one"
_FITS = f"{_FILE}::test_passes_of_a_fit_are_steps_of_fine_tuning"
_FRONT = f"{_FILE}::test_the_front_is_what_nobody_dominates"
_NOBODY = f"{_FILE}::test_controls_and_what_diverged_are_on_no_front"
_CLAIMS = f"{_FILE}::test_nothing_is_claimed_that_intervals_do_not_support"
_COMPARED = (
    f"{_FILE}::test_nobody_is_compared_with_what_costs_more_diverged_or_is_a_control"
)
_ADDED = f"{_FILE}::test_runs_of_another_config_are_replaced_and_others_stay"
_AGAIN = f"{_FILE}::test_a_run_that_is_trained_again_replaces_what_the_page_has"
_TABLE = f"{_FILE}::test_a_table_has_what_the_numbers_say"
_RATE = f"{_FILE}::test_the_best_rate_is_chosen_the_smaller_of_equals"
_PLACE = (
    f"{_FILE}::test_a_directory_follows_the_config_but_not_its_seed_or_where_data_lie"
)

FAULTS = [
    *fault.of(
        "leaderboard/budget.py",
        _PAYS,
        (
            "leaderboard: one less than the budget pays for",
            "max(1, 1 + math.floor(",
            "max(1, math.floor(",
        ),
        (
            "leaderboard: what cannot pay for one gets none",
            "max(1, 1 + math.floor(",
            "max(0, 1 + math.floor(",
        ),
        (
            "leaderboard: what is there once is paid for each time",
            "each = (flops(other) - one) / (other - 1)",
            "each = one",
        ),
        (
            "leaderboard: budgets are passed",
            "while amount > 1 and flops(amount) > budget:",
            "while amount > 1 and flops(amount) > 2 * budget:",
            f"{_FILE}::test_what_costs_a_little_more_than_a_line_still_stays_within",
        ),
        (
            "leaderboard: a config is changed for all that come after",
            "    config = copy.deepcopy(config)\n",
            "",
            f"{_FILE}::test_sections_are_replaced_and_paths_change_what_is_there",
        ),
    ),
    *fault.of(
        "config/recipe.py",
        f"{_FILE}::test_sections_are_replaced_and_paths_change_what_is_there",
        (
            "leaderboard: sections keep what they had",
            "            section[name] = value\n",
            "            section[name] = section.get(name) or value\n",
        ),
    ),
    *fault.of(
        "leaderboard/budget.py",
        _FITS,
        (
            "leaderboard: a fit has the steps of the stream",
            '"batch_size": options["batch_size"],',
            "",
        ),
        (
            "leaderboard: the last batch of a fit is not counted",
            '-(-stored // options["batch_size"])',
            'stored // options["batch_size"]',
        ),
        (
            "leaderboard: every task costs what the first does",
            "cost.flops(work.method.step, *places, index)",
            "cost.flops(work.method.step, *places, 0)",
            f"{_FILE}::test_a_count_is_that_of_the_run[rehearsal-cclis]",
        ),
        (
            "leaderboard: tasks that are not trained are counted",
            "work.stream.tasks[: work.first_tasks]",
            "work.stream.tasks",
            f"{_FILE}::test_a_count_is_that_of_the_run[looks-simclr-frozen]",
        ),
        slow=True,
    ),
    *fault.of(
        "leaderboard/front.py",
        _FRONT,
        (
            "leaderboard: what costs more for the same is on the front",
            "point.mean > kept[-1].mean or same",
            "point.mean >= kept[-1].mean or same",
        ),
        (
            "leaderboard: of the same cost the worst comes first",
            "(p.price, -p.mean)",
            "(p.price, p.mean)",
        ),
        (
            "leaderboard: of points that are the same one is on the front",
            "point.mean > kept[-1].mean or same",
            "point.mean > kept[-1].mean",
        ),
        (
            "leaderboard: what a budget leaves over is a merit",
            "return self.flops if self.over else self.budget",
            "return self.flops",
            f"{_FILE}::test_what_a_budget_leaves_over_is_no_merit",
        ),
        (
            "leaderboard: controls compete",
            "return not self.entry.control and not self.failed",
            "return not self.failed",
            _NOBODY,
        ),
        (
            "leaderboard: what diverged competes",
            "return not self.entry.control and not self.failed",
            "return not self.entry.control",
            _NOBODY,
        ),
    ),
    *fault.of(
        "leaderboard/advice.py",
        _CLAIMS,
        (
            "leaderboard: a mean alone decides",
            "return low is not None and low > 0",
            "return front.difference(first, second).mean > 0",
        ),
        ("leaderboard: two seeds are enough", "LEAST = 3", "LEAST = 2"),
        (
            "leaderboard: what is over its budget is compared",
            "if p.competes and not p.over]",
            "if p.competes]",
            _COMPARED,
        ),
        (
            "leaderboard: a control is below, whatever it has",
            "if above(control, leader):",
            "if above(leader, leader):",
            _COMPARED,
        ),
        (
            "leaderboard: the leader is compared with a control over the budget",
            "or control.failed or control.over:",
            "or control.failed:",
            _COMPARED,
        ),
    ),
    *fault.of(
        "leaderboard/page.py",
        _ADDED,
        (
            "leaderboard: the first task is measured",
            '["scalars"][results_lib.finished(results) - 1]',
            '["scalars"][0]',
        ),
        (
            "leaderboard: runs of two configs are one row",
            'if record.get("run") != own:',
            "if not record:",
        ),
        (
            "leaderboard: the page keeps its number where a run was trained again",
            'if anew or seed not in record["seeds"]:',
            'if seed not in record["seeds"]:',
            _AGAIN,
        ),
        (
            "leaderboard: what is beside the results is not counted",
            'total["flops"] + run.plan.beside',
            'total["flops"]',
        ),
        (
            "leaderboard: nobody is over the budget",
            'over=plan["flops"] > multiple * problem.budget',
            "over=False",
            _TABLE,
        ),
        (
            "leaderboard: a rate at the edge is not marked",
            "edge = rate in (min(rates), max(rates))",
            "edge = False",
            _TABLE,
        ),
    ),
    *fault.of(
        "leaderboard/command.py",
        _RATE,
        (
            "leaderboard: the worst rate is chosen",
            "max(good, key=good.get)",
            "min(good, key=good.get)",
        ),
        (
            "leaderboard: of equal rates the first named is chosen",
            "sorted(found.items())",
            "found.items()",
        ),
        (
            "leaderboard: seeds of a config have directories apart",
            'raw.pop("seed", None)',
            "pass",
            _PLACE,
        ),
    ),
    *fault.of(
        "leaderboard/table.py",
        _RATE,
        (
            "leaderboard: an entry's own rates are not read",
            "return entry.rates or problem.rates",
            "return problem.rates",
        ),
    ),
    *fault.of(
        "leaderboard/page.py",
        "test_leaderboard.py::test_runs_of_another_config_are_replaced_and_others_stay",
        (
            "leaderboard: a search that ends at the same rate is not told",
            'record["searched"] |= run.searched',
            'record["searched"] |= False',
        ),
    ),
    *fault.of(
        "leaderboard/page.py",
        f"{_FILE}::test_a_problem_whose_runs_all_diverged_has_a_page_and_no_picture",
        (
            "leaderboard: a picture of no points",
            "    if not found:\n        return\n",
            "",
        ),
        (
            "leaderboard: a page shows a picture that is not there",
            "    if any(p.accuracy for p in found):",
            "    if found:",
        ),
    ),
    *fault.of(
        "run/results.py",
        f"{_FILE}::test_what_has_not_done_its_last_task_is_not_done",
        (
            "leaderboard: a run is done that is not",
            "return finished(results) >= wanted",
            "return True",
        ),
    ),
]
