"""What the pictures of runs show: points, bands, orders and names, before rendering."""

import numpy as np
import pytest
from PIL import Image

from jaxcl import plots

close = np.testing.assert_allclose


@pytest.fixture
def draw(monkeypatch):
    """draw(function, ...) -> the axes of its figure, which is not rendered."""
    figures = []
    monkeypatch.setattr(
        plots, "save_figure", lambda figure, *_, **__: figures.append(figure)
    )
    return lambda function, *x, **y: [function(*x, "path", **y), figures[-1].axes][1]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def ends_at(band, x):
    corners = band.get_paths()[0].vertices
    return [f(corners[corners[:, 0] == x, 1]) for f in (min, max)]


def test_a_comparison_has_means_and_bands_of_one_deviation(draw):
    runs = np.random.default_rng(0).random((3, 5))
    (axes,) = draw(plots.comparison, {"ours": runs, "peer": runs[0]}, title="t")
    for line, means in zip(axes.lines, (runs.mean(0), runs[0]), strict=True):
        close(line.get_xydata().T, [np.arange(1, 6), 100 * means])
    (band,) = axes.collections  # one run has none
    ends = 100 * (runs.mean(0) + np.outer([-1, 1], runs.std(0, ddof=1))).T
    close([ends_at(band, task + 1) for task in range(5)], ends)
    assert legend(axes) == ["ours (3 seeds)", "peer"]


def test_a_life_has_its_interval_its_limit_and_what_was_rolled_back(draw):
    first = plots.LifePoint(0.9, 0.85, 0.8, 0.87, 0.02, True)
    second = plots.LifePoint(0.7, 0.72, 0.71, 0.76, None, False)
    (axes,) = draw(plots.life, {1: first, 3: second})
    found = []
    for drawn in axes.containers:
        line, _, (bars,) = drawn
        found.append(
            (drawn.get_label(), *line.get_xydata()[0], *bars.get_segments()[0][:, 1])
        )
    assert [x[0] for x in found] == ["accepted", "rolled back"]
    close([x[1:] for x in found], [[1, 85, 80, 87], [3, 72, 71, 76]])
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    close(lines["reference"], [[1, 90], [3, 70]])
    close(lines["limit"], [[1, 88], [3, np.nan]])


@pytest.mark.parametrize("ends, named", [([10, 30, 40], True), ([10, 11, 40], False)])
def test_every_other_task_is_shaded_and_named_where_it_has_room(draw, ends, named):
    steps, mean, half = np.array([[10, 30], [0.5, 0.25], [0.1, 0.2]])
    runs = {"one": (steps, mean, half), "none": (steps, mean, None)}
    (axes,) = draw(plots.anytime, runs, task_ends=ends)
    middles = {text.get_text(): text.get_position()[0] for text in axes.texts}
    assert middles == ({"task 1": 5, "task 2": 20, "task 3": 35} if named else {})
    close([line.get_xydata() for line in axes.lines], [[[10, 50], [30, 25]]] * 2)
    (band,), (shade,) = axes.collections, axes.patches
    close(ends_at(band, 30), [5, 45])
    assert (shade.get_x(), shade.get_width()) == (ends[0], ends[1] - ends[0])
    (axes,) = draw(plots.per_step, {"loss": (steps, mean)}, task_ends=ends)
    close(axes.lines[0].get_xydata(), [[10, 0.5], [30, 0.25]])


def test_shares_of_classes_stand_in_the_order_of_the_first_time(draw):
    shares = np.random.default_rng(0).dirichlet(np.ones(4), 11)
    (axes,) = draw(plots.class_shares, np.arange(11) * 10, shares)
    order, chosen = np.argsort(-shares[0]), [0, 2, 4, 6, 8, 10]
    assert legend(axes) == [f"step {10 * i}" for i in chosen]
    level, *lines = (line.get_ydata() for line in axes.lines)
    assert {*level} == {25}
    close(lines, 100 * shares[chosen][:, order])
    assert [x.get_text() for x in axes.get_xticklabels()] == [str(x) for x in order]
    many = np.linspace(1, 0, 45)[None]  # a mean of two or three classes in each place
    (axes,) = draw(plots.class_shares, [0], many / many.sum())
    labels = [int(x.get_text()) for x in axes.get_xticklabels()]
    assert len(labels) == plots.MOST_NAMES and [*labels[:2], labels[-1]] == [1, 4, 44]


def test_spreads_of_classes_stand_in_the_order_of_the_first_similarities(draw):
    spreads = np.random.default_rng(0).random((2, 2, 5))
    (axes,) = draw(plots.class_spread, dict(zip("ab", spreads, strict=True)))
    want = spreads[..., np.argsort(spreads[0, 1])].reshape(4, 5)
    close([line.get_ydata() for line in axes.lines], want)
    assert legend(axes) == ["a: intra", "a: inter", "b: intra", "b: inter"]


def test_points_have_the_names_of_their_classes(draw):
    rows = np.arange(8.0).reshape(4, 2)
    names = {"title": "t", "class_names": ["a", "b", "$c"]}
    (axes,) = draw(plots.scatter, rows, [2, 0, 2, 7], **names)
    assert legend(axes) == ["a", r"\$c", "7"]
    for dots, want in zip(axes.collections, ([1], [0, 2], [3]), strict=True):
        close(dots.get_offsets(), rows[want])


def test_each_neighbour_has_its_similarity(draw):
    images = np.arange(6, dtype=np.uint8).reshape(2, 3, 1, 1, 1)
    shares = np.array([[0.25, 0.5], [0.75, 1.0]])
    panels = draw(plots.neighbours, images[:, 0], images[:, 1:], shares, title="t")
    titles = ["image", "0.25", "0.50", "", "0.75", "1.00"]
    assert [axes.get_title() for axes in panels] == titles
    shown = [axes.images[0].get_array()[0, 0] for axes in panels]
    close(shown, np.arange(6)[:, None] + np.zeros(3))


def test_a_summary_has_its_images_and_the_last_value_of_each_curve(draw):
    images = [np.full((2, 2, 2), value, np.uint8) for value in range(3)]
    runs = {"low": [[0.8, 0.5], [0.9, 0.6]], "near": [0.3, 0.56], "flat": [0.2]}
    strip, axes = draw(plots.summary, runs, [images], title="t", chance=0.1)
    sheet = strip.images[0].get_array()  # of two channels the first is grey
    close(sheet[::2, ::2, 2], [[0, 1], [2, 255]])
    curves = {line.get_label(): line.get_ydata() for line in axes.lines}
    close(curves["low (2 seeds)"], [85, 55])
    close(curves["flat"], [20, 20])
    ends = {text.get_text(): text.xy[1] for text in axes.texts}
    assert [*ends] == ["flat  20 %", "low  55 %", "near  56 %"]
    close([*ends.values()], [20, 55, 55 + 91 / 14])  # without overlap
    assert axes.get_ylim() == (8, 101)


@pytest.mark.parametrize(
    "low, high, ends", [(0.42, 0.58, (40, 60)), (0.4, 0.9, (40, 90)), (0, 0, (0, 20))]
)
def test_a_heat_map_has_each_accuracy_in_its_place(draw, low, high, ends):
    matrix = np.array([[high, np.nan], [low, high]])
    names = ["one", "a name of more than twenty-four letters"]
    axes, _ = draw(plots.accuracy_matrix, matrix, title="t", task_names=names)
    texts = {text.get_position(): float(text.get_text()) for text in axes.texts}
    value, other = round(100 * high, 1), round(100 * low, 1)
    assert texts == {(0, 0): value, (0, 1): other, (1, 1): value}  # (column, row)
    assert axes.images[0].get_clim() == ends
    shown = [tick.get_text() for tick in axes.get_xticklabels()]
    assert shown[0] == "one" and len(shown[1]) == plots.LONGEST
    assert plots.choose_axis_numbers(21) == [1, 5, 10, 15, 20]


def test_an_overview_of_one_task_has_bars_before_and_after():
    names = ["knn/x_incremental", "linear/x_incremental"]
    results = {"matrices": {names[0]: [[0.5]], names[1]: [[0.75]], "knn/all": [[0.1]]}}
    results |= {"untrained": {names[1]: [0.25]}, "task_names": ["a"]}
    rows = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": 0.0}]
    bars, training = plots.overview(results, rows).axes
    heights = [[bar.get_height() for bar in drawn] for drawn in bars.containers]
    close(heights, [[np.nan, 25], [50, 75]])
    close(training.lines[0].get_xydata(), [[1, 2], [3, 0]])


def test_curves_are_divided_where_a_task_begins(draw):
    rows = [{"step": i, "task": (i > 3) + (i > 6), "loss": i / 2} for i in range(1, 8)]
    (axes,) = draw(plots.curves, rows, keys=("loss",))
    lines = [x.get_xdata() for x in axes.lines]
    assert sorted(x[0] for x in lines if len(x) == 2 and x[0] == x[1]) == [4, 7]
    assert [list(x) for x in lines[2:]] == [[1, 2, 3], [4, 5, 6], [7]]


def test_nothing_of_a_picture_is_cut_off_at_its_edge(tmp_path):
    rows = [{"step": i, "task": i > 3, "loss": i / 2, "lr": 0.1} for i in range(1, 8)]
    runs = {"ours": np.random.default_rng(0).random((3, 5))}
    life = {1: plots.LifePoint(0.9, 0.85, 0.8, 0.87, 0.02, True)}
    for name, function, value, options in (
        ("curves", plots.curves, rows, {}),
        ("comparison", plots.comparison, runs, {"title": "t"}),
        ("life", plots.life, life, {}),
    ):
        function(value, tmp_path / f"{name}.png", **options)
        with Image.open(tmp_path / f"{name}.png") as picture:
            ink = (np.asarray(picture.convert("RGB")) < 250).any(-1)
        assert ink.any(), name
        edges = ink[0], ink[-1], ink[:, 0], ink[:, -1]
        assert not any(x.any() for x in edges), name
