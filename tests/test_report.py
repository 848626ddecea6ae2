"""A page of runs: its numbers by hand, and what it refuses."""

import base64
import html.parser
import io
import json
import pathlib

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from helpers import run_directories, toy
from jaxcl import cli
from jaxcl.report import page as report_page
from jaxcl.run import cost, finish, result_file

KNN = "knn/class_incremental"
UNIX = 1_800_000_000.0  # 2027-01-15 08:00
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"' onload=y&amp;"
ER = ([[0.8, 0.2], [0.4, 0.6]], [[0.9, 0.1], [0.2, 0.6]], [[0.9, 0.3], [0.8, 0.9]])
ACE = ([[0.7, 0.1], [0.6, 0.8]], [[0.8, 0.1], [0.6, 0.6]])
VOID = {"meta", "img", "link", "br"}


# Runs as they are left


def leave(
    folder,
    matrix,
    *,
    seed=0,
    name=KNN,
    config=None,
    rows=None,
    scalars=None,
    names=None,
    **more,
):
    """A run after as many tasks as the matrix has rows; `more` goes to its results."""
    results = result_file.empty_results(len(matrix[0]), task_names=names)
    spent = {"train": 10.0, "compile": 1.0, "evaluation": 2.0}
    machine = {"device": "cpu", "num_devices": 2, "peak_bytes": None}
    entry, logged = cost.TaskCost(5, 50, 100, spent, machine), []
    for task, row in enumerate(matrix):
        results = result_file.add_task(results, task, {name: row}, scalars or {}, 13.5)
        results["cost"] = cost.add_task(results["cost"], task, entry)
        logged.append({"step": 5 * task + 5, "task": task, "eval": {name: row}})
    rows = [{"time": {"unix": UNIX + row["step"]}} | row for row in rows or logged]
    config = {"seed": seed, "name": "x", **(config or {})}
    run_directories.write(folder, config, rows, {**results, **more})
    return folder


@pytest.fixture
def runs(tmp_path):
    for name, matrices in (("er", ER), ("ace", ACE)):
        for seed, matrix in enumerate(matrices):
            leave(tmp_path / name / f"seed_{seed}", matrix, seed=seed)
    leave(tmp_path / "one", [[1.0, 0.0], [0.5, 0.5]], seed=1)
    return tmp_path


# Reading a page


class Node:
    def __init__(self, tag, attributes, parent):
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children = []

    def text(self):
        parts = [c if isinstance(c, str) else c.text() for c in self.children]
        return "".join(parts)

    def all(self, tag, **wanted):
        for child in self.children:
            if isinstance(child, Node):
                have = {k: child.attributes.get(k.rstrip("_")) for k in wanted}
                if child.tag == tag and have == wanted:
                    yield child
                yield from child.all(tag, **wanted)

    def one(self, tag, **wanted):
        (found,) = self.all(tag, **wanted)
        return found


class Tree(html.parser.HTMLParser):
    """The page as a tree; it fails where elements are not closed as they should be."""

    def __init__(self, text):
        super().__init__()
        self.root = self.at = Node("root", {}, None)
        self.tags, self.given = set(), []
        self.feed(text)
        self.close()
        assert self.at is self.root

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        self.tags.add(tag)
        self.given += attrs
        if tag not in VOID:
            self.at = node

    def handle_endtag(self, tag):
        assert self.at.tag == tag, f"</{tag}> in <{self.at.tag}>"
        self.at = self.at.parent

    def handle_data(self, data):
        self.at.children.append(data)


def made(*folders, out=None, **options):
    out = out or pathlib.Path(folders[0]).parent / "page.html"
    told = [f"--{key}={value}" for key, value in options.items()]
    assert cli.main(["report", *map(str, folders), f"--out={out}", *told]) == 0
    return out


def page(*folders, **options):
    return Tree(made(*folders, **options).read_text()).root


def table(root, label):
    """Row header -> {column: lines of the cell}."""
    boxes = root.all("div")
    (inside,) = [box for box in boxes if box.attributes.get("aria-label") == label]
    grid = inside.one("table")
    head = [*grid.one("thead").all("th")]
    assert {cell.attributes["scope"] for cell in head} == {"col"}
    titles = [
        "".join(c if isinstance(c, str) else "" for c in th.children) for th in head
    ]
    found = {}
    for row in grid.one("tbody").all("tr"):
        name = row.one("th", scope="row").text()
        cells = [
            [c if isinstance(c, str) else c.text() for c in cell.children]
            for cell in row.all("td")
        ]
        # Above the names of rows there may be no header.
        found[name] = dict(zip(titles[-len(cells) :], cells, strict=True))
    return found


def interval(values, *, scale=100.0, form="{:.1f}"):
    """Mean and interval as text, by scipy."""
    values = scale * np.array(values, float)
    mean, ends = values.mean(), "-"
    if len(values) > 1:
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        ends = f"[{form.format(mean - half)}, {form.format(mean + half)}]"
        ends = ends.replace("-", "−")
    return form.format(mean).replace("-", "−"), ends


def measures_of(matrix):
    a = np.array(matrix, float)
    return {
        "average accuracy": a[1].mean(),
        "anytime": (a[0, 0] + a[1].mean()) / 2,
        "forgetting": a[0, 0] - a[1, 0],
        "stability": max(a[0, 0], a[1, 0]) - a[1, 0],
    }


def test_means_intervals_and_paired_differences(runs):
    found = table(page(runs / "er", runs / "ace", runs / "one"), f"measures of {KNN}")
    each = {"er": [*map(measures_of, ER)], "ace": [*map(measures_of, ACE)]}
    each["one"] = [measures_of([[1.0, 0.0], [0.5, 0.5]])]
    assert list(found) == ["er", "ace", "one"]
    assert [found[name]["seeds"] for name in found] == [["3"], ["2"], ["1"]]
    for measure in each["er"][0]:
        er = [one[measure] for one in each["er"]]
        ace = [one[measure] for one in each["ace"]]
        assert tuple(found["er"][measure]) == interval(er)
        pairs = [a - b for a, b in zip(ace, er[:2], strict=True)]
        delta = "Δ " + " ".join(interval(pairs, form="{:+.1f}"))
        assert found["ace"][measure] == [*interval(ace), delta]
        # "one" has seed 1 alone.
        (value,) = (one[measure] for one in each["one"])
        delta = "Δ " + " ".join(interval([value - er[1]], form="{:+.1f}"))
        assert found["one"][measure] == [f"{100 * value:.1f}", "-", delta]
    # By hand: 50, 40 and 85 %; t of 2 degrees of freedom is 4.303, the error 13.64.
    assert found["er"]["average accuracy"] == ["58.3", "[−0.4, 117.0]"]


def test_plasticity_and_the_untrained_network(tmp_path):
    matrix = [[0.8, 0.3], [0.6, 0.7]]
    alone = {"finetune": {KNN: [0.9, 0.75]}, "untrained": {KNN: [0.1, None]}}
    leave(tmp_path / "a", matrix, **alone)
    leave(tmp_path / "b", matrix)
    root = page(tmp_path / "a", tmp_path / "b")
    found = table(root, f"measures of {KNN}")
    assert found["a"]["plasticity"] == ["−45.0", "-"]  # 0.3 - 0.75
    assert found["b"]["plasticity"] == ["-"]
    assert found["a"]["untrained"] == ["10.0", "-"]
    assert found["b"]["untrained"] == ["-"]
    rows = table(root, f"{KNN} of a")
    assert list(rows) == ["untrained", "after 1", "after 2", "alone"]
    assert rows["untrained"]["1"] == ["10.0"] and rows["untrained"]["mean"] == ["10.0"]
    assert rows["untrained"]["2"] == ["-"]
    assert rows["alone"]["mean"] == ["82.5"]


def test_what_the_first_run_lacks_is_not_compared_with_it(runs):
    """Differences say over how many seeds they are; configs, what one has alone."""
    for name, seed in (("b", 0), ("c", 0)):
        matrix, config = [[0.5, 0.5], [0.5, 0.0]], {f"only_{name}": 1}
        leave(runs / name, matrix, seed=seed, name="other", config=config)
    leave(runs / "part", [[0.9, 0.1]])
    root = page(*(runs / name for name in ("ace", "er", "b", "c", "part")))
    part = table(root, f"measures of {KNN}")["part"]
    assert part["average accuracy"] == ["90.0", "-", "Δ -"]  # it is not over
    found = table(root, "measures of other")
    assert "Δ" not in "".join(found["b"]["anytime"] + found["c"]["anytime"])
    value, _, delta = table(root, f"measures of {KNN}")["er"]["average accuracy"]
    assert value == "58.3" and delta.endswith("n = 2")  # of its three seeds
    assert root.text().count("only_b") > 1  # as a difference, too
    (group,) = report_page.run_groups.read_all([runs / "er"])
    group.logged_rows[1].append({"time": {"unix": UNIX + 99}})  # the last of all seeds
    assert report_page._time_of_results(group) == UNIX + 99
    pictures = runs / "one" / "plots"
    pictures.mkdir()
    for name, size in (("a", 1_900_000), ("b", 200_000), ("c", 90_000), ("summary", 9)):
        (pictures / f"{name}.png").write_bytes(bytes(size))
    (group,) = report_page.run_groups.read_all([runs / "one"])
    drawn = report_page._read_pictures(group)
    assert [name for name, _ in drawn] == ["summary", "a", "c"]


def test_accuracy_matrices_are_means_over_seeds(runs):
    leave(runs / "gaps" / "seed_0", [[0.5, None], [0.4, 0.75]])
    leave(runs / "gaps" / "seed_1", [[0.7, None], [None, 0.25]])
    root = page(runs / "er", runs / "gaps")
    mean = np.mean(ER, axis=0)
    rows = table(root, f"{KNN} of er")
    for i in range(2):
        got = [rows[f"after {i + 1}"][str(j + 1)] for j in range(2)]
        assert got == [[f"{100 * mean[i, j]:.1f}"] for j in range(2)]
    assert rows["after 1"]["mean"] == [f"{100 * mean[0, 0]:.1f}"]
    assert rows["after 2"]["mean"] == [f"{100 * mean[1].mean():.1f}"]
    rows = table(root, f"{KNN} of gaps")
    assert rows["after 1"] == {"1": ["60.0"], "2": ["-"], "mean": ["60.0"]}
    assert rows["after 2"]["1"] == ["40.0"] and rows["after 2"]["2"] == ["50.0"]


ALLOWED = set(
    "html head meta title style body header main h1 h2 h3 p table thead tbody tr th td "
    "span ul li div figure figcaption b details summary pre img".split()
)


def check_harmless(path):
    tree = Tree(path.read_text())
    assert tree.tags <= ALLOWED
    assert not [key for key, _ in tree.given if key.startswith("on")]
    loads = [value for key, value in tree.given if key in ("src", "href", "srcset")]
    assert all(value.startswith(("#", "data:image/png")) for value in loads)
    text = path.read_text()
    assert "://" not in text and "url(" not in text and "@import" not in text
    (policy,) = [
        meta.attributes["content"]
        for meta in tree.root.all("meta")
        if "http-equiv" in meta.attributes
    ]
    assert "default-src 'none'" in policy and "script-src" not in policy
    return tree.root


def evil(tmp_path):
    """Runs where every name that a file may hold is markup."""
    short = EVIL.replace("/", "")  # a directory has no slash
    rows = [
        {"step": step, "task": 0, EVIL: 1.0 * step, "eval": {EVIL: 0.5 * step}}
        for step in (1, 2, 3)
    ]
    source = {"path": EVIL, "step": EVIL, "checksum": EVIL}
    best = {"number": 1, "loss": 1.0, "seconds": 1.0, "passes": 1.0}
    more = {"checkpoint": source, "convergence": {"0": {"best": best, "last": best}}}
    more["untrained"] = {EVIL: [0.5, 0.5]}
    folders = []
    for number in range(2):
        folder = leave(
            tmp_path / str(number) / short,
            ER[0],
            name=EVIL,
            rows=rows,
            names=[EVIL, "\ud800"],
            scalars={EVIL: 1.0},
            config={EVIL: {EVIL: f"{EVIL}{number}"}},
            **more,
        )
        results = result_file.read_results(folder)
        results["cost"] |= {"device": EVIL, "jax": EVIL}
        result_file.write_results(folder, results)
        folders.append(folder)
    return folders


def test_nothing_that_comes_from_files_becomes_markup(tmp_path):
    path = made(*evil(tmp_path), out=tmp_path / "page.html", title=EVIL)
    root = check_harmless(path)
    assert root.one("h1").text() == root.one("head").one("title").text() == EVIL
    assert root.text().count("<script>alert('x')</script>") > 20
    assert f"measures of {EVIL}" in {
        n.attributes.get("aria-label") for n in root.all("div")
    }


def test_refuses_what_is_no_run(runs, capsys):
    def refused(*arguments):
        out = runs / "refused.html"
        assert cli.main(["report", *map(str, arguments), f"--out={out}"]) == 2
        assert not out.exists()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxcl: ")
        return line

    assert "none" in refused(runs / "er", runs / "none")
    assert "er:" in refused(runs / "er", f"{runs}/er/")
    (runs / "one" / "results.json").write_text("{")
    assert f"{runs}/one/results.json" in refused(runs / "one")
    (runs / "one" / "results.json").write_text("[]")
    assert "results.json" in refused(runs / "one")
    for line in ("{", "[1]", "7"):
        (runs / "ace" / "seed_0" / "metrics.jsonl").write_text(f"{line}\n")
        assert "seed_0/metrics.jsonl: line 1" in refused(runs / "ace")
    missing = runs / "no" / "x.html"
    assert cli.main(["report", str(runs / "er"), f"--out={missing}"]) == 2
    assert capsys.readouterr().err.startswith("jaxcl: ")


def test_a_real_run(tmp_path):
    changes = {"method": {"name": "er"}, "evaluators": {"predict": {"met_only": False}}}
    changes |= {"scenario.num_tasks": 5, "epochs": 1, "evaluate_untrained": True}
    work = toy.job(tmp_path / "run", tasks=2, **toy.ONLINE, **changes)
    results, name = finish.run_job(work, tmp_path / "run"), "predict/class_incremental"
    root = page(tmp_path / "run")
    want = result_file.summary(results)[name]
    found = table(root, f"measures of {name}")["run"]
    for title in ("average accuracy", "forgetting", "stability"):
        value = want[title.replace(" ", "_")]
        assert found[title] == [f"{100 * value:.1f}".replace("-", "−"), "-"]
    before = np.mean(results["untrained"][name])
    assert found["untrained"] == [f"{100 * before:.1f}", "-"]
    spent, row = results["cost"]["total"], table(root, "cost")["run"]
    assert row["steps"] == [str(spent["steps"])]
    seconds = float(row["training (s)"][0])
    assert seconds == pytest.approx(spent["train_seconds"], abs=0.06)
    titles = {caption.one("b").text() for caption in root.all("figcaption")}
    assert any(title.startswith("loss") for title in titles)
    for image in root.all("img", class_="chart"):
        data = base64.b64decode(image.attributes["src"].partition(",")[2])
        assert Image.open(io.BytesIO(data)).format == "PNG"
    check_harmless(tmp_path / "page.html")


def test_the_life_of_an_encoder_is_drawn(runs, monkeypatch):
    """Of updates that were compared; the interval is that of the difference."""
    for number, (accepted, loss) in enumerate([(True, 0.01), (False, 0.1)], 1):
        pairs = {"before": 0.9, "after": 0.9 - loss, "low": loss - 0.02}
        compared = {"limit": 0.02, "matrices": {KNN: {"reference": pairs}}}
        pairs["high"] = loss + 0.03
        update = runs / "one" / "updates" / f"{number:04d}"
        update.mkdir(parents=True)
        (update / "update.json").write_text(
            json.dumps({"accepted": accepted, "gate": compared})
        )
    (runs / "one" / "updates" / "0003").mkdir()  # is not finished
    drawn, draw = [], report_page.plots.life
    monkeypatch.setattr(
        report_page.plots, "life", lambda *given: (drawn.append(given[0]), draw(*given))
    )
    page = report_page.write_page([runs / "one"], runs / "page.html")
    assert "Updates" in page
    ((first, second),) = (x.values() for x in drawn)
    np.testing.assert_allclose(first[:5], (0.9, 0.89, 0.86, 0.91, 0.02))
    np.testing.assert_allclose(second[:5], (0.9, 0.8, 0.77, 0.82, 0.02))
    assert first.accepted and not second.accepted
    assert "Updates" not in report_page.write_page([runs / "er"], runs / "page.html")


def test_a_run_that_goes_on_is_not_set_against_one_that_is_over(runs):
    leave(runs / "part", [[0.9, 0.1]])
    leave(runs / "same", [[0.7, 0.1]])
    root = page(runs / "er", runs / "part")
    assert "part: 1 of 2 tasks" in root.text()
    found = table(root, f"measures of {KNN}")["part"]
    assert found["average accuracy"] == ["90.0", "-", "Δ -"]
    assert found["forgetting"] == ["-"] or found["forgetting"][0] == "-"
    found = table(page(runs / "part", runs / "same"), f"measures of {KNN}")["same"]
    assert found["average accuracy"] == ["70.0", "-", "Δ −20.0 -"]
