"""One page about runs: `python -m jaxcl.report runs/er runs/er_ace --out=report.html`.

Each directory is a run, or one of several seeds (config.seeds). The page is one file
that loads nothing: measures with intervals over seeds, differences to the first run,
cost, accuracy matrices, curves, and what the configs differ in.
"""

import argparse
import collections
import json
import sys

from etils import epath

from jaxcl.report import compare, numbers
from jaxcl.report import page as page_lib
from jaxcl.run import record, task_alone
from jaxcl.run import results as results_lib


def _names(workdirs) -> list[str]:
    """A name for each directory: as few of its last parts as tell it from others.

    Raises:
      ValueError: a directory comes twice.
    """
    paths = [epath.Path(workdir) for workdir in workdirs]
    for path, count in collections.Counter(paths).items():
        if count > 1:
            raise ValueError(f"{path}: given {count} times; name each run once")
    names, parts = [path.name or path.resolve().name for path in paths], 1
    while len(set(names)) < len(names):
        parts += 1
        names = [
            "/".join(path.parts[-parts:]) if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def load(workdir, name: str) -> numbers.Run:
    """A run directory, or that of several seeds, as the page takes it.

    Raises:
      ValueError: it holds no results, or a file in it is damaged.
    """
    path = epath.Path(workdir)
    try:
        run = compare.read(path)
        run = run._replace(name=name, results=_whole(run.results))
        done = {seed: results_lib.finished(each) for seed, each in run.results.items()}
        most = max(done.values())
        kept = {seed: run.results[seed] for seed in done if done[seed] == most}
        together = path / "together"
        rows = _rows(run, together)
        config = _config([path, *run.folders.values()])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if str(path) in str(error):
            raise
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: a file in it is damaged ({told})") from error
    return numbers.Run(
        name=name,
        workdir=str(workdir),
        run=run._replace(
            results=kept, folders={seed: run.folders[seed] for seed in kept}
        ),
        rows={seed: rows[seed] for seed in kept if seed in rows},
        config=config,
        behind={seed: count for seed, count in done.items() if count < most},
        together=together.exists(),
    )


def _whole(results):
    """Results with all keys, also of runs that left none of some."""
    return {
        seed: results_lib.empty(len(each["task_names"])) | each
        for seed, each in results.items()
    }


def _rows(run, together) -> dict[int, list]:
    """Rows of each seed; of seeds that ran side by side, from their common file."""
    found = {
        seed: record.read_rows(folder)
        for seed, folder in run.folders.items()
        if (folder / record.ROWS).exists()
    }
    if found or not (together / record.ROWS).exists():
        return found
    common = record.read_rows(together)
    for number, seed in enumerate(run.folders):
        mark = f"/{run.folders[seed].name}/"
        found[seed] = []
        for row in common:
            if "eval" in row:
                own = {
                    name.replace(mark, "/"): value
                    for name, value in row["eval"].items()
                    if mark in name
                }
                found[seed].append({**row, "eval": own})
            elif number == 0:  # metrics of steps are means over all seeds
                found[seed].append(row)
    return found


def _config(folders) -> dict | None:
    for folder in folders:
        if (folder / "config.json").exists():
            return json.loads((folder / "config.json").read_text())
    return None


def _date(run: numbers.Run) -> float:
    """When the results were made, in seconds since 1970.

    A copied file has the time of the copy, so that the last logged row goes first.
    """
    found = [rows[-1].get("time", {}).get("unix") for rows in run.rows.values() if rows]
    found = [unix for unix in found if unix is not None]
    files = [folder / results_lib.RESULTS for folder in run.run.folders.values()]
    return max(found) if found else max(file.stat().mtime for file in files)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    made.add_argument("--out", default="report.html", help="the page")
    made.add_argument("--title", default=None, help="default: names of the runs")
    return made


def main(argv=None) -> int:
    """The command; exit code 2 where a directory holds no run."""
    options = parser().parse_args(argv)
    try:
        names = _names(options.runs)
        runs = [load(*each) for each in zip(options.runs, names, strict=True)]
        page = page_lib.page(
            runs,
            title=options.title or ", ".join(names),
            dates={run.name: _date(run) for run in runs},
            version=task_alone.version(),
        )
        epath.Path(options.out).write_text(page)
    except (ValueError, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    size = len(page.encode()) / 1000
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    print(f"{options.out}: {count}, {size:,.0f} kB")
    return 0
