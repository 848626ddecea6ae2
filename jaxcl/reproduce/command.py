"""Reproduce a published number: `python -m jaxcl.reproduce NAME --seeds=5`.

A row of `table.ROWS` is run with several seeds, each in a directory of its own, where
the same command goes on after an interruption. Then our number is printed beside the
published one with a verdict, and written into docs/reproductions.json and the page made
of it. `--list` names the rows. Exit codes are those of `jaxcl.main`: 0 whatever the
verdict is.
"""

import argparse
import os

from etils import epath

from jaxcl.config import build, command, files
from jaxcl.data import storage
from jaxcl.reproduce import page, table
from jaxcl.run import finish, seeds
from jaxcl.run import results as results_lib


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = _parsed(argv)
    if given.list:
        print(listed())
        return 0

    def make():
        row = table.find(given.name)
        config = configured(row, seeds=given.seeds, data=given.data)
        workdir = epath.Path(given.out) / row.name
        chosen = range(config.seed, config.seed + given.seeds)
        folders = {seed: workdir / seeds.folder(seed) for seed in chosen}
        workdir = workdir if given.seeds > 1 else folders[config.seed]
        # The code's commit now: it may have another when training is over.
        commit = page.commit()
        return row, build.build(config, workdir), workdir, folders, commit

    def work(made, stop):
        row, runs, workdir, folders, commit = made
        finish.run(runs, workdir, stop=stop)
        results = {seed: results_lib.read_results(x) for seed, x in folders.items()}
        costs = [own["cost"]["total"] for own in results.values()]
        if getattr(runs, "side_by_side", False):  # each has the cost of all
            costs = costs[:1]
        found = page.add(_json(given.page), row, results, costs, commit)
        with storage.replacing(given.page) as file:
            file.write(page.written(found).encode())
        print(page.comparison(row, found[row.name]), flush=True)

    return command.run(make, work)


def _parsed(argv):
    parser = argparse.ArgumentParser(
        prog="python -m jaxcl.reproduce",
        description="Run a published setting, and print our number beside theirs.",
    )
    parser.add_argument("name", nargs="?", help="a row, see --list")
    parser.add_argument("--list", action="store_true", help="name all rows")
    parser.add_argument("--seeds", type=int, default=5, help="how many; 5")
    parser.add_argument(
        "--data", default="data", help="folder with a folder or .npz file of each set"
    )
    parser.add_argument(
        "--out", default="runs/reproduce", help="folder for the run directories"
    )
    parser.add_argument(
        "--page",
        default="docs/reproductions.md",
        help="the page to write; its .json beside it holds the results",
    )
    given = parser.parse_args(argv)
    if given.list == (given.name is not None):
        parser.error("give the NAME of a row, or --list")
    if given.seeds < 1:
        parser.error(f"--seeds={given.seeds}: must be at least 1")
    if not given.page.endswith(".md"):
        parser.error(f"--page={given.page}: must end in .md")
    return given


def _json(path: str) -> str:
    return path.removesuffix(".md") + ".json"


def listed() -> str:
    """All rows: name, what it is, the published number, minutes of a run on a core."""
    lines = [f"{'name':32}{'published':>11}{'minutes':>9}  what"]
    for row in table.ROWS.values():
        value = f"{row.published.value:.2f}{'' if row.published.read else '?'}"
        lines.append(f"{row.name:32}{value:>11}{row.minutes:>9g}  {row.what}")
    return "\n".join([*lines, "A ? marks values from memory, which judge nothing."])


def configured(row: table.Row, *, seeds: int, data: str):
    """The config of a row, as the command line of `jaxcl.main` would make it.

    Raises:
      ValueError: there is no such config or set of data; the message says where it
        was looked for.
    """
    file, _, words = row.config.partition(":")
    argv = [f"--config=configs/{file}.py" + (f":{words}" if words else "")]
    argv += [f"--config.{override}" for override in row.overrides]
    config = files.read(argv)
    config.seeds = seeds
    config.plots = config.tensorboard = False  # numbers are what is wanted
    config.data.update(found(data, row.data, config.data.name))
    return config


def found(folder: str, name: str, source: str) -> dict[str, str]:
    """What config.data must say to read a set: a folder of this name, or a file.

    Args:
      folder: where sets lie.
      name: of the set.
      source: config.data.name.

    Raises:
      ValueError: it is not there.
    """
    whole, packed = os.path.join(folder, name), os.path.join(folder, f"{name}.npz")
    if os.path.isdir(whole):
        return {"path": whole}
    if os.path.exists(packed):
        return {"path": packed, **({"name": "npz"} if source == "arrays" else {})}
    raise ValueError(
        f"--data={folder}: has neither {name}/, which `python -m jaxcl.data.convert` "
        f"writes, nor {name}.npz"
    )
