"""Write one page about runs: `jaxcl report runs/er runs/er_ace --out=report.html`.

Each directory is a run, or holds the runs of several seeds (config.seeds). The page is
one file that loads nothing else. It shows measures with intervals over seeds,
differences to the first run, cost, accuracy matrices, curves, and how the configs
differ.
"""

import argparse
import sys
from collections.abc import Sequence

from etils import epath

from jaxcl.report import page as page_lib
from jaxcl.report import runs as runs_lib


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options."""
    arguments = argparse.ArgumentParser(
        prog="jaxcl report", description=__doc__.splitlines()[0]
    )
    arguments.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    arguments.add_argument("--out", default="report.html", help="HTML file to write")
    arguments.add_argument("--title", default=None, help="default: the runs' names")
    return arguments


def write_page(
    workdirs: Sequence[epath.PathLike], out: epath.PathLike, title: str | None = None
) -> str:
    """Write the page of some runs, and return it.

    Args:
      workdirs: run directories, of one seed or of several.
      out: path of the page.
      title: None: the names of the runs.

    Raises:
      ValueError, OSError: a directory holds no run, or the page cannot be written.
    """
    runs = runs_lib.read_all(workdirs)
    title = title or ", ".join(run.name for run in runs)
    page = page_lib.make_page(runs, title=title)
    epath.Path(out).write_text(page)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxcl report`; return 2 if a directory holds no run."""
    options = parser().parse_args(argv)
    try:
        page = write_page(options.runs, options.out, options.title)
    except (ValueError, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    size = len(page.encode()) / 1000
    count = f"{len(options.runs)} runs" if len(options.runs) > 1 else "1 run"
    print(f"{options.out}: {count}, {size:,.0f} kB")
    return 0
