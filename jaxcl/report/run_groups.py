"""Read run directories: results, logged rows and configs of all seeds."""

import collections
import dataclasses
import functools
from collections.abc import Sequence

from etils import epath

from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.report import comparability
from jaxcl.run import log_file, result_file, seeds


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """The runs of one directory, one for each seed, all after the same task."""

    name: str  # unique among the compared runs
    workdir: str  # path as the user wrote it
    results: dict[int, dict]  # seed -> results, see `result_file.empty_results`
    folders: dict[int, epath.Path]  # seed -> its run directory
    configs: comparability.Configs = comparability.Configs()
    # Seed -> finished tasks, of seeds that are behind the others.
    behind: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def first_results(self) -> dict:
        """The results of one seed, for values that all seeds share."""
        return next(iter(self.results.values()))

    @property
    def finished_tasks(self) -> int:
        """The number of finished tasks."""
        return result_file.count_finished(self.first_results)

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self.first_results["task_names"])

    @functools.cached_property
    def measures(self) -> dict[int, dict]:
        """The measures of each seed, see `seeds.measures`."""
        return {seed: seeds.measures(results) for seed, results in self.results.items()}

    @functools.cached_property
    def logged_rows(self) -> dict[int, list]:
        """The rows of metrics.jsonl of each seed that has one."""
        return {
            seed: log_file.read_rows(folder)
            for seed, folder in self.folders.items()
            if (folder / log_file.FILE).exists()
        }


def read_run(workdir: epath.PathLike, name: str | None = None) -> RunGroup:
    """Read the directory of one run or of several seeds.

    Seeds that have finished fewer tasks than others are left out.

    Args:
      workdir: the directory.
      name: name of the run; None: the directory's.

    Raises:
      Refused: there are no results.
    """
    path = epath.Path(workdir)
    places: dict[int | None, epath.Path] = {None: path}
    if by_seed := seeds.folders(path):
        places = dict(by_seed.items())
    folders = {seed: x for seed, x in places.items() if result_file.has_results(x)}
    if not folders and result_file.has_results(path):
        folders = {None: path}
    if not folders:
        missing = "no run in it has finished a task" if path.is_dir() else "no such run"
        raise Refused(f"{path}: {missing}")
    if None in folders:
        folders = {storage.read_object(path / "config.json").get("seed", 0): path}
    results, finished = {}, {}
    try:
        for seed, folder in folders.items():
            content = result_file.read_results(folder)
            # Empty values for keys that the file lacks.
            content = result_file.empty_results(len(content["task_names"])) | content
            results[seed] = content
            finished[seed] = result_file.count_finished(content)
    except (KeyError, TypeError, AttributeError) as error:
        file = result_file.RESULTS
        raise Refused(f"{path}: its {file} is damaged: {error!r}") from error
    most = max(finished.values())
    return RunGroup(
        name=name or path.name,
        workdir=str(workdir),
        results={s: x for s, x in results.items() if finished[s] == most},
        folders={s: x for s, x in folders.items() if finished[s] == most},
        configs=comparability.read_config([path, *folders.values()]),
        behind={seed: n for seed, n in finished.items() if n < most},
    )


def read_all(workdirs: Sequence[epath.PathLike]) -> list[RunGroup]:
    """Read several directories; name each by the shortest unique end of its path.

    Raises:
      Refused: a directory is given twice, or holds no results.
    """
    paths = [epath.Path(workdir) for workdir in workdirs]
    for path, count in collections.Counter(paths).items():
        if count > 1:
            raise Refused(f"{path}: given {count} times; name each run once")
    names, depth = [path.name or path.resolve().name for path in paths], 1
    while len(set(names)) < len(names):
        depth += 1
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return [read_run(*pair) for pair in zip(workdirs, names, strict=True)]


def are_comparable(run: RunGroup, first: RunGroup) -> bool:
    """Tell whether both runs are finished, or have finished equally many tasks."""
    done = [r.finished_tasks == r.num_tasks for r in (run, first)]
    return all(done) or (not any(done) and run.finished_tasks == first.finished_tasks)


def paired_differences(values: dict, others: dict) -> list[float]:
    """Return differences over the seeds that both have; leave out None."""
    pairs = [(values[seed], others[seed]) for seed in sorted({*values} & {*others})]
    return [a - b for a, b in pairs if None not in (a, b)]


def measure_by_seed(run: RunGroup, name: str, measure: str) -> dict[int, float | None]:
    """Map seed -> a measure of a matrix, see `seeds.measures`; None without it."""
    return {seed: x.get(name, {}).get(measure) for seed, x in run.measures.items()}


def list_remarks(run: RunGroup) -> list[str]:
    """List remarks about a run that qualify its numbers."""
    lines = []
    if run.finished_tasks == 0:
        lines.append("no task is finished yet")
    elif run.finished_tasks < run.num_tasks:
        lines.append(
            f"{run.finished_tasks} of {run.num_tasks} tasks are finished; "
            "measures are of these"
        )
    if run.behind:
        behind = (f"seed {s} ({n} of {run.num_tasks})" for s, n in run.behind.items())
        lines.append(f"left out, since others have come further: {', '.join(behind)}")
    return [f"{run.name}: {line}" for line in lines]
