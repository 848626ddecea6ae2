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

from jaxcl.report import compare, numbers
from jaxcl.report import page as page_lib
from jaxcl.run import results as results_lib
from jaxcl.run import task_alone

_PICTURE_BYTES = 2_000_000  # of all pictures of a run, so that the page stays small


def load(workdir: epath.PathLike, name: str) -> numbers.Run:
    """Read a run directory, or that of several seeds.

    Args:
      workdir: the directory.
      name: of the run on the page.

    Raises:
      ValueError: it holds no results, or a file in it is damaged.
    """
    path = epath.Path(workdir)
    try:
        run = compare.read(path)
        run = run._replace(name=name, results=_completed(run.results))
        run = compare.level(run)
        rows = compare.rows(run)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if str(path) in str(error):
            raise
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: a file in it is damaged ({told})") from error
    return numbers.Run(
        name=name,
        workdir=str(workdir),
        run=run,
        rows=rows,
        pictures=_pictures(run),
    )


def _pictures(run: compare.Run) -> tuple[tuple[str, bytes], ...]:
    """Read the pictures of the first seed, but those that the page draws itself.

    The summary is the first; pictures that would make the page too large are left out.
    """
    seed, folder = next(iter(run.folders.items()))
    drawn = {name.replace("/", "_") for name in run.results[seed]["matrices"]}
    files = [
        file
        for pattern in ("*.png", "*/*.png")
        for file in sorted((folder / "plots").glob(pattern))
        if file.stem not in (*drawn, "curves")
    ]
    files.sort(key=lambda file: file.stem != "summary")
    found, left = [], _PICTURE_BYTES
    for file in files:
        data = file.read_bytes()
        if len(data) <= left:
            found.append((file.stem.replace("_", " "), data))
            left -= len(data)
    return tuple(found)


def _completed(results):
    """The results of each seed, with empty values for keys that its file lacks."""
    return {
        seed: results_lib.empty(len(own["task_names"])) | own
        for seed, own in results.items()
    }


def _date(run: numbers.Run) -> float:
    """When the results were made, in seconds since 1970.

    The time of the last logged row is preferred to that of the file, which is the time
    of the copy if somebody copied it.
    """
    logged = [
        rows[-1].get("time", {}).get("unix") for rows in run.rows.values() if rows
    ]
    logged = [unix for unix in logged if unix is not None]
    files = [folder / results_lib.RESULTS for folder in run.run.folders.values()]
    return max(logged) if logged else max(file.stat().mtime for file in files)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    arguments = argparse.ArgumentParser(
        prog="jaxcl report", description=__doc__.splitlines()[0]
    )
    arguments.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    arguments.add_argument("--out", default="report.html", help="the page")
    arguments.add_argument("--title", default=None, help="default: names of the runs")
    return arguments


def write(
    workdirs: Sequence[epath.PathLike], out: epath.PathLike, title: str | None = None
) -> str:
    """Write the page of some runs, and return it.

    Args:
      workdirs: run directories, of one seed or of several.
      out: where the page goes.
      title: None: the names of the runs.

    Raises:
      ValueError, OSError: a directory holds no run, or the page cannot be written.
    """
    names = compare.names_of(workdirs)
    runs = [load(workdir, name) for workdir, name in zip(workdirs, names, strict=True)]
    page = page_lib.page(
        runs,
        title=title or ", ".join(names),
        dates={run.name: _date(run) for run in runs},
        version=task_alone.version(),
    )
    epath.Path(out).write_text(page)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 2 if a directory holds no run."""
    options = parser().parse_args(argv)
    try:
        page = write(options.runs, options.out, options.title)
    except (ValueError, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    size = len(page.encode()) / 1000
    count = f"{len(options.runs)} runs" if len(options.runs) > 1 else "1 run"
    print(f"{options.out}: {count}, {size:,.0f} kB")
    return 0
