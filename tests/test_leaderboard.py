"""The leaderboard: budgets, the front, advice, the page, and a run of the command."""

import importlib
import json
import math
import pathlib
import pkgutil
import re
import shlex

import ml_collections
import numpy as np
import pytest

import jaxcl.methods
from helpers import config_files
from jaxcl.config import build, sections
from jaxcl.leaderboard import advice, budget, command, front, page, table
from jaxcl.run import finish
from jaxcl.run import results as results_lib

ROOT = pathlib.Path(__file__).parents[1]
EVERY_ENTRY = [
    pytest.param(problem, entry, id=f"{problem.name}-{entry.name}")
    for problem in table.PROBLEMS.values()
    for entry in problem.entries
]


# --- the table -----------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Empty folders of every set."""
    where = tmp_path_factory.mktemp("sets")
    for problem in table.PROBLEMS.values():
        if problem.data:
            (where / problem.data).mkdir(exist_ok=True)
    return str(where)


@pytest.mark.parametrize("problem, entry", EVERY_ENTRY)
def test_every_entry_is_a_config_with_a_judge(problem, entry, folder):
    config = command.configured(problem, entry, data=folder)
    spends = entry.spends or problem.spends
    changes = {budget.FIELDS[spends]: 1, "seed": 1}  # what is counted first
    if rates := table.rates(problem, entry):
        changes |= {entry.rate: rates[0], **problem.search}
        chooser = table.entry(problem, entry.rate_of or entry.name)
        assert chooser.rate_of in (None, chooser.name)
        assert table.rates(problem, chooser) == rates
    config = budget.changed(config, changes)
    top, *_ = config_files.made(config, 10)
    assert problem.measure.partition("/")[0] in top.evaluators
    assert sections.tasks(top.data, dict(top.scenario), top.seed)
    assert (top.plots, top.plasticity, top.save_every) == (False, False, 0)


def test_names_are_unique_and_baselines_are_methods():
    for problem in table.PROBLEMS.values():
        names = [entry.name for entry in problem.entries]
        titles = [entry.title for entry in problem.entries]
        assert len({*names}) == len(names) and len({*titles}) == len(titles)
        assert not table.entry(problem, problem.baseline).control
        assert problem.multiples[0] == 1 and list(problem.multiples) == sorted(
            problem.multiples
        )


def test_no_method_has_lost_its_entry(folder):
    used = set()
    for problem, entry in (param.values for param in EVERY_ENTRY):
        config = command.configured(problem, entry, data=folder)
        used.add(config.method.name)
    there = {
        found.name
        for found in pkgutil.iter_modules(jaxcl.methods.__path__)
        if hasattr(importlib.import_module(f"jaxcl.methods.{found.name}"), "make")
    }
    assert used <= there
    # Whoever adds a method need not add an entry; none of these loses its own.
    assert used >= {
        *("aser", "agem", "cclis", "co2l", "der", "duel", "er", "er_ace", "er_aml"),
        *("er_lwf",),
        *("finetune", "gcr", "gdumb", "gem", "gss", "icarl", "icl", "mir"),
        *("online_ssl", "ss_il", "two_view"),
    }


def test_sections_are_replaced_and_paths_change_what_is_there():
    problem = table.LOOKS
    config = command.configured(problem, problem.entries[0], data="")
    new = budget.changed(config, {"scenario": {"name": "joint"}, "method.base": "byol"})
    assert new.scenario.to_dict() == {"name": "joint"} and new.method.base == "byol"
    assert new.method.strategy == config.method.strategy
    assert config.scenario.name == "domain"  # a copy was changed
    # A value that follows another field is cut loose.
    assert budget.changed(config, {"optimizer.lr": 0.7}).optimizer.lr == 0.7


def test_a_directory_follows_the_config_but_not_its_seed_or_where_data_lie(folder):
    problem = table.SPLIT_MNIST
    entry = table.entry(problem, "er")
    config = command.configured(problem, entry, data=folder)
    own = command.digest(config)
    same = {"seed": 7, "data.path": "elsewhere"}
    assert command.digest(budget.changed(config, same)) == own
    for other in ({"replay.updates": 2}, {"optimizer.lr": 0.05}, {"epochs": 2}):
        assert command.digest(budget.changed(config, other)) != own


def test_the_list_has_every_entry(capsys):
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    for problem, entry in (param.values for param in EVERY_ENTRY):
        assert f"\n{problem.name}: " in f"\n{said}" and f"  {entry.name} " in said


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--seeds=0"], "--seeds=0: must be at least 1"),
        (["--minutes=0"], "--minutes=0.0: must be above 0"),
        (["--page=x.txt"], "--page=x.txt: must end in .md"),
    ],
)
def test_wrong_options_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--problems", "look"], "did you mean looks"),
        (["--problems", "looks", "--only", "x"], "--only=x: no problem has such an"),
        (["--problems", "split_mnist"], "has neither mnist/"),
        (["--problems", "looks", "--multiples", "3"], "--multiples=3: looks has 1, 4"),
    ],
)
def test_what_is_not_there_is_refused(arguments, words, tmp_path, capsys):
    places = [f"--{x}={tmp_path / x}" for x in ("data", "out")]
    assert command.main([*arguments, *places, f"--page={tmp_path}/a.md"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- budgets -------------------------------------------------------------------


def test_as_much_as_the_budget_pays_for_and_never_less_than_one():
    rng = np.random.default_rng(0)
    for _ in range(200):
        fixed, each = rng.integers(0, 50), rng.integers(1, 50)
        budget_, asked = rng.integers(1, 500), []

        def flops(n, fixed=fixed, each=each, asked=asked):
            asked.append(n)
            return int(fixed + each * n)

        within = [n for n in range(1, 600) if fixed + each * n <= budget_]
        assert budget.affordable(flops, budget_) == max(within, default=1)
        assert len({*asked}) <= 3  # a count takes seconds


def test_what_costs_a_little_more_than_a_line_still_stays_within():
    """Every third update costs one more."""
    for limit in range(1, 400):
        chosen = budget.affordable(lambda n: 5 * n + n // 3 + 2, limit)
        assert chosen == 1 or 5 * chosen + chosen // 3 + 2 <= limit


def test_passes_of_a_fit_are_steps_of_fine_tuning():
    """GDumb's memory of 20 fills up: two batches of 16 a pass."""
    problem = tiny()
    gdumb, plain = (table.entry(problem, name) for name in ("gdumb", "finetune"))
    config = command.configured(problem, gdumb, data="")
    config = budget.changed(config, {"replay.per_class": 5})
    plan = budget.plan("passes", config, problem.budget)
    fits = command.configured(problem, plain, data="")
    fits = budget.counted(budget.changed(fits, {"batch_size": 16}))
    stored = budget.counted(config).flops
    each = 2 * fits.flops // fits.steps
    assert plan.amount == (problem.budget - stored) // each > 1
    assert plan.beside == plan.amount * each == plan.flops - stored


# --- the front -----------------------------------------------------------------


def point(name, accuracy, flops=1.0, *, multiple=1, control="", **fields):
    """A point; `accuracy` of seeds 0, 1, ..."""
    values = np.atleast_1d(accuracy).astype(float).tolist()
    filled = {
        "entry": table.Entry(name, name.upper(), control=control),
        "multiple": multiple,
        "amount": 1,
        "rate": None,
        "searched": True,
        "accuracy": dict(enumerate(values)),
        "forgetting": {},
        "budget": flops,
        "flops": flops,
        "seconds": 1.0,
        "state_bytes": 1000,
        "failed": 0,
        "over": False,
    }
    return front.Point(**(filled | fields))


def test_the_front_is_what_nobody_dominates():
    """Against all pairs, on a grid so coarse that there are ties."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        count = rng.integers(1, 12)
        points = [
            point(str(i), rng.integers(0, 5), int(rng.integers(1, 5)))
            for i in range(count)
        ]
        left = [
            p
            for p in points
            if not any(
                q.flops <= p.flops
                and q.mean >= p.mean
                and (q.flops < p.flops or q.mean > p.mean)
                for q in points
            )
        ]
        got = front.pareto(points)
        assert sorted(p.entry.name for p in got) == sorted(p.entry.name for p in left)
        assert [p.flops for p in got] == sorted(p.flops for p in got)


def test_what_a_budget_leaves_over_is_no_merit():
    good, left = point("a", 50.0, 9.0, budget=10.0), point("b", 40.0, 8.0, budget=10.0)
    over = point("c", 60.0, 11.0, budget=10.0, over=True)
    wasted = point("d", 55.0, 12.0, budget=40.0)
    assert front.pareto([wasted, left, over, good]) == [good, over]


def test_controls_and_what_diverged_are_on_no_front():
    points = [
        point("a", 50.0),
        point("joint", 90.0, control="all data"),
        point("b", 80.0, failed=1),
        point("c", [], failed=3),
    ]
    assert front.pareto(points) == points[:1]


def test_differences_are_paired_by_seed():
    first = point("a", [3.0, 5.0, 9.0])
    second = point("b", [1.0, 4.0, 6.0])
    apart = front.difference(first, second)
    assert apart.mean == pytest.approx(2.0) and apart.seeds == 3
    # Differences 2, 1, 3: deviation 1; Student's t of two degrees is 4.3027.
    assert apart.high - apart.mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    other = second._replace(accuracy={1: 4.0, 2: 6.0, 7: 0.0})
    assert front.difference(first, other).seeds == 2
    assert front.difference(first, point("c", 1.0)).low is None


# --- advice --------------------------------------------------------------------

BASE = [60.0, 62.0, 61.0]


def shifted(by, noise=0.1):
    return [x + by + noise * i for i, x in enumerate(BASE)]


def problem_of(*, multiples=(1,)):
    return table.LOOKS._replace(baseline="plain", multiples=multiples)


def said(*points, **fields):
    return advice.sentences(problem_of(**fields), points)


def test_a_leader_is_named_with_what_supports_it():
    (sentence,) = said(
        point("plain", BASE),
        point("good", shifted(5)),
        point("near", shifted(5, -0.1), state_bytes=200),
        point("bad", shifted(-3)),
    )
    apart = front.difference(point("good", shifted(5)), point("plain", BASE))
    assert sentence == (
        "With 1x the budget **GOOD** has the highest mean, 66.1 %; 5.1 "
        f"({apart.low:.1f} to {apart.high:.1f}) points above PLAIN; it is shown to be "
        "above 2 of 3 others and not above *NEAR*. Of those not told apart NEAR "
        "carries the least along, 0 kB."
    )


def test_nothing_is_claimed_that_intervals_do_not_support():
    wild = [66.0, 61.0, 63.0]  # two points above the mean of the baseline, and 4 apart
    (sentence,) = said(point("plain", BASE), point("good", wild))
    assert sentence.startswith(
        "With 1x the budget nothing is shown to be above PLAIN: **GOOD** has the "
        "highest mean, 63.3 %, 2.3 ("
    )
    assert not said(point("plain", BASE[:2]), point("good", shifted(5)[:2]))
    assert not said(point("good", shifted(5)))


def test_nobody_is_compared_with_what_costs_more_diverged_or_is_a_control():
    (sentence, control) = said(
        point("plain", BASE),
        point("good", shifted(5)),
        point("dear", shifted(9), over=True),
        point("lost", shifted(9), failed=1),
        point("joint", shifted(9), control="needs all data"),
    )
    assert "**GOOD**" in sentence and "above 1 of 1 others" in sentence
    assert control.startswith("JOINT, which needs all data, is 4.0 (4.0 to 4.0) points")
    assert control.endswith("above GOOD.")
    (_, control) = said(
        point("plain", BASE),
        point("good", shifted(5)),
        point("frozen", shifted(1), control="learns nothing"),
    )
    assert control.endswith("points below GOOD.")
    assert (
        len(
            said(
                point("plain", BASE),
                point("good", shifted(5)),
                point("other", [70.0, 60.0, 68.0], control="not told apart"),
                point("retrain", shifted(9), control="needs all data", over=True),
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    "by, words",
    [
        (2, "the budget gains 2."),
        (-2, "the budget loses 2."),
        (0, "gains nothing that"),
    ],
)
def test_what_more_budget_brings(by, words):
    more = shifted(5 + by) if by else [60.0, 72.0, 66.0]
    sentences = said(
        point("plain", BASE),
        point("good", shifted(5)),
        point("good", more, multiple=4),
        multiples=(1, 4),
    )
    assert len(sentences) == 2
    assert sentences[1].startswith("GOOD from 1x to 4x the budget")
    assert words in sentences[1]


# --- the page ------------------------------------------------------------------


def test_the_page_is_made_of_the_numbers_beside_it():
    numbers = json.loads((ROOT / "docs" / "leaderboard.json").read_text())
    assert set(numbers) <= set(table.PROBLEMS)
    assert (ROOT / "docs" / "leaderboard.md").read_text() == page.written(numbers)
    records = [
        record
        for of_problem in numbers.values()
        for of_entry in of_problem.values()
        for record in of_entry.values()
    ]
    assert records and not any(record["commit"].endswith("+") for record in records)
    for name in numbers:
        assert (ROOT / "docs" / "images" / f"leaderboard_{name}.png").exists()


def test_commands_of_the_page_have_the_options_there_are(monkeypatch):
    text = page.written({name: {} for name in table.PROBLEMS} | canned())
    commands = re.findall(r"^python -m jaxcl\.leaderboard (.*)$", text, re.M)
    assert commands
    for words in commands:
        assert command._parsed(shlex.split(words)).problems[0] in table.PROBLEMS


def canned():
    """Numbers of two entries of a problem, one of which diverged once."""

    def record(values, flops, failed=False, rate=0.1, searched=True):
        seeds = {
            str(s): {"accuracy": x, "flops": flops, "seconds": 2.0, "forgetting": 4.0}
            for s, x in enumerate(values)
        }
        seeds["0"]["untrained"] = 50.0
        seeds |= {"9": {"failed": True}} if failed else {}
        plan = {"amount": 7, "flops": flops, "state_bytes": 2500}
        about = {"commit": "abc", "jax": "1", "date": "2026-01-01", "machine": "pc"}
        about |= {"searched": searched}
        return {"run": "x", "rate": rate, "plan": plan, "seeds": seeds, **about}

    whole = table.LOOKS.budget
    return {
        "looks": {
            "mocov2plus-finetune": {"x1": record(BASE, 0.9 * whole)},
            "mocov2plus-pnr": {
                "x1": record(shifted(5), 0.8 * whole, rate=0.3),
                "x4": record([70.0], 5 * whole, failed=True),
            },
            "mocov2plus-joint": {"x1": record([80.0], 1.5 * whole, searched=False)},
        }
    }


def test_a_table_has_what_the_numbers_say(tmp_path):
    text = page.written(canned())
    rows = [
        line for line in text.splitlines() if line.startswith(("| MoCo", "| *MoCo"))
    ]
    first, second, third, fourth = rows
    giga = table.LOOKS.budget / 1e9
    assert first == (
        "| *MoCo v2+, all looks at once* (control: needs all data at once) | 80.0 (1) "
        f"| 4.0 (1) | 7 epochs, 150 %, **over** | {1.5 * giga:.3g} | 2 | 2.0 "
        "| 0.1 (not searched) |  |"
    )
    assert second == (
        "| MoCo v2+, PNR | 66.1 +- 0.6 (3) | 4.0 +- 0.0 (3) | 7 epochs, 80 % | "
        f"{0.8 * giga:.3g} | 2 | 2.0 | 0.3* | yes |"
    )
    assert third.startswith("| MoCo v2+, fine-tuning | 61.0 +- 0.6 (3) | ")
    assert third.endswith("| 0.1 |  |")
    assert "| 70.0 (1, 1 diverged) |" in fourth and "**over**" in fourth
    assert "The network before any training has 50.0 %." in text
    lacks = "Maybe low for want of a search of learning rates: "
    assert f"- {lacks}MoCo v2+, all looks at once.\n" in text
    assert "- `duel` at 1x: all of it." in text
    lacking = text.partition("## Not run yet")[2]
    assert "- `looks` at 1x: MoCo v2+, CaSSLe; MoCo v2+, Less-Forget; " in lacking
    for title in ("BYOL", "SimSiam", "VICReg", "DINO", "LeJEPA"):
        assert f"{title}, fine-tuning; {title}, CaSSLe; {title}, PNR; " in lacking
    assert "0.003, 0.01, 0.03, 0.1, 0.3; of VICReg 0.003, 0.01, 0.03." in text
    assert "commit abc" in text
    page.write(tmp_path / "a.md", canned())
    assert (tmp_path / "a.md").read_text() == text
    assert (tmp_path / "images" / "leaderboard_looks.png").stat().st_size > 10_000


def test_a_problem_whose_runs_all_diverged_has_a_page_and_no_picture(tmp_path):
    plan = {"amount": 7, "flops": 100, "state_bytes": 2500}
    record = {"run": "x", "rate": 0.1, "searched": True, "plan": plan}
    record |= {"seeds": {"0": {"failed": True}}, "commit": "abc", "jax": "1"}
    record |= {"date": "2026-01-01", "machine": "pc"}
    page.write(tmp_path / "a.md", {"looks": {"mocov2plus-pnr": {"x1": record}}})
    text = (tmp_path / "a.md").read_text()
    assert "diverged (1)" in text and "![" not in text
    assert "Run 2026-01-01 on pc, JAX 1, commit abc." in text
    assert not [*(tmp_path / "images").iterdir()]


def test_runs_of_another_config_are_replaced_and_others_stay():
    numbers = {}
    plan = budget.Plan(amount=3, flops=100, beside=10, state_bytes=5)
    entry = table.LOOKS.entries[0]
    results = results_lib.empty(2) | {
        "untrained": {"knn/class_incremental": [0.1, 0.2]}
    }
    for task, row in enumerate(([0.9, np.nan], [0.5, 0.7])):
        rows, last = {"knn/class_incremental": row}, {"knn/accuracy": 0.3 + 0.3 * task}
        results = results_lib.add(results, task, rows, last, 1.0)
    total = {"flops": 90, "train_seconds": 2.0, "evaluation_seconds": 1.0}
    results["cost"] |= {"total": total, "device": "cpu", "num_devices": 1}

    def add(seed, own, results=results, searched=True):
        config = ml_collections.ConfigDict({"seed": seed})
        run = command.Run(table.LOOKS, entry, 1, plan, 0.1, config, pathlib.Path())
        run = run._replace(searched=searched)
        page.add(numbers, run, own, results, "abc")
        return numbers["looks"][entry.name]["x1"]

    add(0, "x1-a")
    record = add(1, "x1-a", None)
    assert record["seeds"]["1"] == {"failed": True}
    assert record["seeds"]["0"] == {
        "accuracy": 60.0,
        "flops": 100,
        "seconds": 3.0,
        "forgetting": 40.0,
        "untrained": 15.0,
    }
    assert record["device"] == "1 x cpu"
    record["date"] = "2020-01-01"
    assert add(0, "x1-a")["date"] == "2020-01-01"  # it was there
    assert list(add(2, "x1-b", searched=False)["seeds"]) == ["2"]
    # A search that came after ended at the same rate.
    for searched, said in ((False, False), (True, True), (False, True)):
        assert add(3, "x1-b", searched=searched)["searched"] is said


def test_the_best_rate_is_chosen_the_smaller_of_equals(tmp_path, monkeypatch):
    arguments = [f"--page={tmp_path}/a.md", f"--out={tmp_path}"]
    board = command.Board(command._parsed(arguments))
    problem = tiny()._replace(rates=(0.3, 0.1, 0.2, 0.4))
    came_to = {0.3: 0.7, 0.1: 0.6, 0.2: 0.7, 0.4: None}
    runs = [
        command.Run(problem, None, 1, None, rate, None, None) for rate in problem.rates
    ]
    monkeypatch.setattr(board, "search", lambda *_: runs)
    monkeypatch.setattr(command, "came_to", lambda run: came_to[run.rate])
    plain, *_ = problem.entries
    assert board.best(problem, plain) == 0.2
    came_to |= dict.fromkeys(came_to, None)
    assert board.best(problem, plain) is None
    board.given.no_search = True
    assert board.best(problem, plain) == 0.3  # the middle of 0.1, 0.2, 0.3, 0.4
    own = plain._replace(rates=(5.0, 7.0, 6.0))  # an entry may have rates of its own
    assert board.best(problem, own) == 6.0


def test_a_run_that_is_trained_again_replaces_what_the_page_has(tmp_path, monkeypatch):
    """As in another --out, beside the numbers that a checkout brings along."""
    came_to = iter((0.3, 0.6))

    def train(board, run):
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text("{}")
        last = {"predict/accuracy": next(came_to)}
        results = results_lib.add(results_lib.empty(1), 0, {}, last, 1.0)
        total = {"flops": 90, "train_seconds": 2.0, "evaluation_seconds": 1.0}
        results["cost"] |= {"total": total, "device": "cpu", "num_devices": 1}
        results_lib.write_results(run.folder, results)

    monkeypatch.setattr(command.Board, "_train", train)
    board = command.Board(command._parsed([f"--page={tmp_path}/a.md"]))
    problem, plan = tiny(), budget.Plan(amount=3, flops=90, beside=0, state_bytes=5)
    config = ml_collections.ConfigDict({"seed": 0})

    def accuracy_after(folder):
        folder = tmp_path / folder / "x1-a" / "seed_0"
        run = command.Run(problem, problem.entries[0], 1, plan, None, config, folder)
        monkeypatch.setattr(board, "write", lambda problems: None)
        board.do(run)
        record = board.numbers[problem.name][problem.entries[0].name]["x1"]
        return record["seeds"]["0"]["accuracy"]

    assert [accuracy_after(x) for x in ("one", "other", "one")] == [30.0, 60.0, 60.0]


def test_what_has_not_done_its_last_task_is_not_done(tmp_path):
    assert not command.finished(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    results = results_lib.add(results_lib.empty(2), 0, {}, {"a": 1.0}, 1.0)
    results_lib.write_results(tmp_path, results)
    assert not command.finished(tmp_path)
    (tmp_path / "config.json").write_text('{"first_tasks": 1}')
    assert command.finished(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    results_lib.write_results(tmp_path, results_lib.add(results, 1, {}, {}, 1.0))
    assert command.finished(tmp_path)


# --- the whole command ---------------------------------------------------------


def tiny():
    """A problem of seconds: digits of four classes, two methods."""
    problem = table.DIGITS_ONLINE
    changes = problem.changes | {
        "encoder": {"name": "mlp", "widths": (16,)},
        "scenario": {"name": "class", "num_tasks": 2, "classes": (0, 1, 2, 3)},
        "batch_size": 20,
        "replay.per_class": 4,
    }
    entries = [table.entry(problem, name) for name in ("finetune", "gdumb")]
    return problem._replace(
        name="tiny",
        changes=changes,
        entries=tuple(entries),
        budget=3e6,
        multiples=(1, 3),
        rates=(0.03, 1e30),  # with the second nothing stays finite
    )


def test_a_problem_runs_whole_and_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(table.PROBLEMS, "tiny", tiny())
    written = tmp_path / "board.md"
    arguments = ["--problems", "tiny", "--seeds=1", f"--page={written}"]
    arguments += [f"--out={tmp_path / 'runs'}"]
    assert command.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    stored = json.loads((tmp_path / "board.json").read_text())["tiny"]
    for entry in tiny().entries:
        for multiple in (1, 3):
            record = stored[entry.name][f"x{multiple}"]
            assert list(record["seeds"]) == ["0"] and record["rate"] == 0.03
            for seed, own in record["seeds"].items():
                folder = tmp_path / "runs" / "tiny" / entry.name / record["run"]
                results = results_lib.read_results(folder / f"seed_{seed}")
                last = results["scalars"][-1]["predict/accuracy"]
                assert own["accuracy"] == round(100 * last, 4)
                # Counted before the run, and by the run.
                beside = own["flops"] - results["cost"]["total"]["flops"]
                assert own["flops"] == record["plan"]["flops"] <= multiple * 3e6
                assert (beside > 0) == (entry.name == "gdumb")
            # One more would have been too much.
            amount = record["plan"]["amount"]
            assert record["plan"]["flops"] * (amount + 1) / amount > multiple * 3e6
    small, large = (stored["finetune"][f"x{m}"]["plan"]["amount"] for m in (1, 3))
    assert small < large
    assert written.read_text() == page.written({"tiny": stored})
    assert sum("diverged" in line for line in lines) == 2
    # Again: nothing is left to do, and what was measured stays.
    monkeypatch.setattr(finish, "run", None)
    assert command.main(arguments) == 0
    assert json.loads((tmp_path / "board.json").read_text())["tiny"] == stored


def test_a_run_stops_when_its_time_is_over_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(table.PROBLEMS, "tiny", tiny()._replace(rates=()))
    arguments = ["--problems", "tiny", "--seeds=1", "--only", "finetune"]
    arguments += ["--multiples", "1", f"--out={tmp_path / 'runs'}"]
    arguments += [f"--page={tmp_path / 'board.md'}"]
    assert command.main([*arguments, "--minutes=1e-9"]) == 0
    assert "are over; the same command goes on" in capsys.readouterr().out
    assert json.loads((tmp_path / "board.json").read_text()) == {}
    assert command.main(arguments) == 0
    stored = json.loads((tmp_path / "board.json").read_text())["tiny"]
    assert list(stored) == ["finetune"] and list(stored["finetune"]) == ["x1"]


@pytest.mark.parametrize(
    "name, entry",
    [
        ("rehearsal", "cclis"),
        ("looks", "simclr-frozen"),
        ("looks_online", "cla_r-fifo"),
    ],
)
def test_a_count_is_that_of_the_run(name, entry, tmp_path):
    """Where a task trains on stored rows, one task is trained, updates are several."""
    problem = table.find(name)
    entry = table.entry(problem, entry)
    config = command.configured(problem, entry, data="")
    looks = ("plain", "rotated") if name == "looks" else ("plain",)
    scenario = {"per_class": 12} if name == "rehearsal" else {"looks": looks}
    changes = {"replay.updates": 2} if name == "looks_online" else {"epochs": 2}
    section = "scenario" if name == "rehearsal" else "data"
    changes |= {f"{section}.{key}": value for key, value in scenario.items()}
    changes |= {"batch_size": 16, "evaluators": {}}
    if name == "rehearsal":
        changes["method.memory_size"] = 10
    config = budget.changed(config, changes)
    count = budget.counted(config)
    total = finish.run(build.build(config, tmp_path), tmp_path)["cost"]["total"]
    assert (count.flops, count.steps) == (total["flops"], total["steps"])
