"""Tools of all pictures: figures, formats, colours, axes."""

import io
import itertools
import os
import re
from collections.abc import Sequence

import numpy as np
from etils import epath

# Colours that differ from each other with any colour vision, and from white.
COLOURS = ("#0b5cad", "#a83200", "#00805c", "#b04a86", "#a98600", "#2f9bd0", "#3d4248")
DASHES = ("-", "--", ":")  # with the colours again
MARKERS = ("o", "s", "^", "D", "v")
# A method's place here sets its colour and marker in all pictures of the project. The
# names in one place are of one method.
METHODS = (
    ("er_ace",),
    ("finetune", "fine_tuning"),
    ("joint", "all_at_once", "a_new_encoder"),
    ("pnr",),
    ("untrained", "no_update"),
    ("er",),
    ("cassle",),
    ("der",),
    ("derpp",),
    ("er_aml",),
    ("er_lwf",),
    ("mir",),
    ("less_forget",),
    ("agem",),
    ("icarl",),
    ("gdumb",),
)
MOST_NAMES = 20  # more classes or tasks than this are not written out
MOST_NAMED_TASKS = 9  # above the axes; each takes at least this part of the width
LONGEST = 24  # letters of a name
FORMATS = ("png", "svg", "pdf")
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def make_figure(width, height, **options):
    """Make an empty figure of a size in inches."""
    from matplotlib.figure import Figure  # half a second, for runs that draw alone

    return Figure(figsize=(width, height), **options)


def save_figure(figure, path, *, dpi: int = 120) -> None:
    """Write a figure in the format that the path ends in, one of `FORMATS`.

    The same figure gives the same bytes. Raises ValueError for another ending.
    """
    kind = read_format(path)
    # Else an SVG has the time of day and random names, a PDF the time.
    options = {} if kind == "png" else {"metadata": _UNDATED[kind]}
    picture = io.BytesIO()
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "jaxcl", "pdf.fonttype": 42}):
        figure.savefig(picture, format=kind, dpi=dpi, bbox_inches="tight", **options)
    epath.Path(path).write_bytes(picture.getvalue())


def read_format(path) -> str:
    """Read the format in the name of a picture, before anything is computed."""
    kind = os.path.splitext(os.fspath(path))[1].lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"{os.fspath(path)}: a picture must end in one of {FORMATS}")
    return kind


def choose_style(number: int) -> dict:
    """Return the colour and marker of a curve, class or run; 35 differ."""
    marker = MARKERS[number % len(MARKERS)]
    return {"color": COLOURS[number % len(COLOURS)], "marker": marker}


def find_method(name: str) -> int | None:
    """Find the place in `METHODS` of the last method that a name mentions, or None.

    Examples:
      >>> from jaxcl.evals.plots import canvas
      >>> [canvas.METHODS[canvas.find_method(x)][0] for x in ("ER-ACE", "pnr_finetune")]
      ['er_ace', 'finetune']
    """
    words = "_".join(["", *re.findall(r"[a-z0-9]+", name.lower()), ""])
    ends = [
        (words.rindex(f"_{known}_") + len(known), len(known), place)
        for place, names in enumerate(METHODS)
        for known in names
        if f"_{known}_" in words
    ]
    return max(ends)[2] if ends else None


def number_styles(names: Sequence[str]) -> dict[str, int]:
    """Number the style of each name, see `choose_style`; no number comes twice.

    The first name of each known method gets the method's own number. Other names take
    the free numbers in order.
    """
    known = {}
    for name in names:
        place = find_method(name)
        if place is not None:
            known.setdefault(place, name)
    known = {name: place for place, name in known.items()}
    free = (n for n in itertools.count() if n not in known.values())
    return {name: known[name] if name in known else next(free) for name in names}


def line_style(number: int) -> str:
    """Return the line style of a curve without markers; with the colours 21 differ."""
    return DASHES[number // len(COLOURS) % len(DASHES)]


def shade_tasks(axes, task_ends, **options) -> None:
    """Shade every other task; `task_ends` has the last step of each."""
    ends = [0, *np.asarray(task_ends).tolist()]
    for first, last in list(zip(ends, ends[1:], strict=False))[1::2]:
        axes.axvspan(first, last, color="0.93", lw=0, zorder=0, **options)


def name_tasks(axes, task_ends) -> None:
    """Write the number of each task above the axes, if none is too short."""
    ends = [0, *np.asarray(task_ends).tolist()]
    if min(np.diff(ends), default=0) * MOST_NAMED_TASKS < ends[-1]:
        return
    place = axes.get_xaxis_transform()  # x in steps, y as a share of the axes
    for number, (first, last) in enumerate(itertools.pairwise(ends)):
        name, middle = f"task {number + 1}", (first + last) / 2
        axes.text(middle, 1.02, name, transform=place, ha="center", color="0.3")


def make_logarithmic(axes, which, parts) -> None:
    """Make axis "x" or "y" logarithmic, with ticks at `parts` times powers of 10."""
    from matplotlib import ticker

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(ticker.LogLocator(subs=parts))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_locator(ticker.NullLocator())


def show_legend(axes, *entries, **options) -> None:
    """Show the legend to the right of the axes."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axes.legend(*entries, **place, **options)


def escape_dollars(text: str) -> str:
    """Escape dollars, which would begin and end maths in matplotlib."""
    return text.replace("$", r"\$")


def shorten_name(name) -> str:
    """Shorten a name for a legend: `LONGEST` letters at most, and no maths."""
    name = str(name)
    name = name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
    return escape_dollars(name)


def whole_number_ticks():
    """Make a locator that places the ticks of an axis at whole numbers."""
    from matplotlib import ticker

    return ticker.MaxNLocator(integer=True, min_n_ticks=1)


def choose_axis_numbers(count: int) -> list[int]:
    """Choose which of 1..count an axis shows: all, or 1, 5, 10, ... of many."""
    return [
        n for n in range(1, count + 1) if count <= MOST_NAMES or n in (1, n // 5 * 5)
    ]


def draw_mean_and_band(axes, number, x, mean, half, name) -> None:
    """Draw a curve, with a band of `half` to each side unless it is None."""
    style = choose_style(number)
    if half is not None:
        colour = style["color"]
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.2, lw=0)
    axes.plot(x, mean, markersize=4, label=name, **style)
