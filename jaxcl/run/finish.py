"""Carry out a run: train or evaluate, measure plasticity, write results and
pictures."""

from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from jaxcl import lookup, numerics, plots
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.run import (
    cost,
    job,
    lock,
    log_file,
    overview,
    result_file,
    seeds,
    terminal,
    train,
    transfer,
)


@numerics.pinned()
def run_job(
    work: job.Job | transfer.Transfer | seeds.SeedRuns,
    workdir: epath.PathLike,
    *,
    stop: Callable[[], bool] = lambda: False,
    step: Callable | None = None,
) -> dict:
    """Describe the run, train it (or resume), and write results and plots.

    FT_i is measured if the config asks for it.

    Args:
      work: a `job.Job` is trained, a `transfer.Transfer` only evaluated, and every seed
        of a `seeds.SeedRuns` run.
      workdir: the run directory.
      stop: function, as in `train.run_tasks`.
      step: `job.compile_step(work)`, if several runs share the program.

    Returns:
      The results, see `result_file.empty_results`, with "finetune" if measured; for
      several seeds their `seeds.summary`.
    """
    workdir = epath.Path(workdir)
    with terminal.outlive_terminal(), lock.hold_lock(workdir):
        described = overview.describe_run(work, workdir)
        if jax.process_index() == 0:
            print(described, flush=True)
        if isinstance(work, seeds.SeedRuns):
            return _run_seeds(work, workdir, stop)
        return _run_one(work, workdir, stop, step)


def _run_one(work, workdir, stop, step):
    """Train or evaluate one run, write its results and plots."""
    trains = isinstance(work, job.Job)
    if trains:
        step = step or job.compile_step(work)
        results = train.run_tasks(work, workdir, stop=stop, step=step)
        if (accuracies := work.evaluation.single_tasks) is not None:
            if callable(accuracies):
                place = workdir / "single"
                accuracies = single_tasks(work, place, stop=stop, step=step)
            results["finetune"] = result_file.jsonable(accuracies)
    else:
        results = transfer.run_transfer(work, workdir, stop=stop)
    results |= _identify_data(workdir)
    if jax.process_index() == 0:
        result_file.write_results(workdir, results)
        if table := format_results(results):
            print(table, flush=True)
        if trains and work.logging.plots:
            with plots.optional(str(workdir / "plots")):
                draw_run(work, workdir, results)
    return results


def _run_seeds(work, workdir, stop):
    """Run every seed, and summarise their results."""
    results, step = {}, None
    for seed in work.seeds:
        seed_job = _make_seed_job(work, seed)
        # The compiled step does not depend on the seed.
        step = step or job.compile_step(seed_job)
        place = workdir / seeds.folder(seed)
        with lock.hold_lock(place):
            results[seed] = _run_one(seed_job, place, stop, step)
    summary = seeds.summary(results)
    if jax.process_index() == 0:
        seeds.write_summary(workdir, summary)
        print(seeds.format_summary(summary), flush=True)
    return summary


def _identify_data(workdir) -> dict:
    """Describe the data of a run: rows of each split, and a digest of all of them."""
    data = identity.read_identity(workdir)
    if data is None:
        return {}
    rows = {split: len(data.rows(split)) for split in data.splits()}
    return {"data": {"digest": data.digest(), "rows": rows}}


def _make_seed_job(work, seed):
    """Make the job of a seed; raise Refused, which names the seed."""
    try:
        return work.make(seed)
    except Refused as error:
        raise Refused(f"seed {seed}: {error}") from error


def single_tasks(
    work: job.Job, workdir: epath.Path, *, stop: Callable[[], bool], step: Callable
) -> dict[str, list]:
    """Measure FT_i, the accuracy on task i of the method trained on task i alone.

    Each task is a run of its own inside `workdir`, which stays there: it resumes and is
    not trained twice.

    Args:
      work: the run on all tasks.
      workdir: folder for the runs on single tasks.
      stop: function, as in `train.run_tasks`.
      step: the compiled step of `work`, shared if both use the same method.

    Returns:
      Matrix name -> list with FT_i of each task, None for a task that is not trained.
    """
    tasks, accuracies = work.stream.tasks, {}
    single = work.evaluation.single_tasks(work)
    step = step if single.method is work.method else job.compile_step(single)
    for i, task in enumerate(tasks[: work.loop.first_tasks]):
        accuracy = _train_single_task(single, step, i, task, workdir, stop)
        for name, value in accuracy.items():
            accuracies.setdefault(name, [None] * len(tasks))[i] = value
    return accuracies


def _train_single_task(single, step, i, task, workdir, stop):
    """Train or resume the run on task i alone; return matrix name -> FT_i."""
    evaluators = {
        name: lambda state, _, evaluate=evaluate: evaluate(state, i)
        for name, evaluate in single.evaluation.evaluators.items()
    }
    tasks = single.stream._replace(tasks=(task._replace(index=0),))
    only = single._replace(
        data=single.data._replace(stream=tasks),
        loop=single.loop._replace(start=None),  # not what another run has trained
        evaluation=single.evaluation._replace(evaluators=evaluators),
        logging=single.logging._replace(loggers=(), progress=False, quiet=True),
    )
    results = train.run_tasks(only, workdir / f"task_{i}", stop=stop, step=step)
    return {name: matrix[0][i] for name, matrix in results["matrices"].items()}


# Columns of `format_results`: measure of `result_file.summary` -> title
_MEASURES = {"average_accuracy": "average"}
_MEASURES |= {name: name for name in ("forgetting", "stability", "plasticity")}


def format_results(results: dict) -> str:
    """Write the measures of a run, one line per matrix, in percent."""
    titles = {**_MEASURES, "untrained": "untrained"}
    lines = []
    for name, measures in result_file.summary(results).items():
        measures["untrained"] = result_file.untrained(results, name)
        values = (measures.get(key) for key in titles)
        cells = (f"{'-':>12}" if v is None else f"{100 * v:12.1f}" for v in values)
        lines.append(f"{name:28}" + "".join(cells))
    if lines:
        heads = (f"{title:>12}" for title in titles.values())
        lines.insert(0, f"{'after the last task (%)':28}" + "".join(heads))
    if results["cost"]["total"] is not None:
        lines.append(cost.format_line(results["cost"]))
    if worse := result_file.below_untrained(results):
        text = f"{', '.join(worse)}: below the untrained network. Look at the pictures "
        text += "of plots/: do they show whole objects? Try more epochs, a smaller "
        text += "optimizer.lr, or an encoder that is trained already (config.start)"
        lines.append(terminal.style_text(text, "bad"))
    return "\n".join(lines)


def closing(
    work: job.Job | transfer.Transfer | seeds.SeedRuns, workdir: epath.PathLike
) -> str:
    """List the files of a run, and the next commands.

    Args:
      work: the run that `run_job` carried out.
      workdir: the run directory.
    """
    folder, several = epath.Path(workdir), isinstance(work, seeds.SeedRuns)
    lines = [f"Results   {folder / ('seed_N' if several else result_file.RESULTS)}"]
    pictures = folder / "plots"
    if pictures.exists():
        summary = (pictures / "summary.png").exists()
        lines.append(f"Pictures  {pictures}{' (summary.png first)' if summary else ''}")
    lines.append(f"Next      jaxcl report {folder} --out={folder / 'report.html'}")
    if isinstance(work, job.Job):
        following = f"update --run={folder} --data=NEW_IMAGES"
        method = work.method
        if method.supervised or method.labelled or method.replays:
            following = f"compare OTHER_RUN {folder}"
        lines.append(f"{'':10}jaxcl export --run={folder} --out=encoder")
        lines.append(f"{'':10}jaxcl {following}")
    return "\n".join(lines)


def draw_run(work: job.Job, workdir: epath.PathLike, results: dict) -> None:
    """Draw a finished run, in `workdir/plots`.

    Accuracy matrices, training curves, the charts of its evaluators, and the metrics
    that its method wants drawn.
    """
    folder = epath.Path(workdir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for name in results["matrices"]:
        path = folder / f"{name.replace('/', '_')}.png"
        with plots.optional(str(path)):
            matrix, title = result_file.matrix(results, name), plots.write_title(name)
            names = results["task_names"]
            plots.accuracy_matrix(matrix, path, title=title, task_names=names)
    with plots.optional(str(folder / "summary.png")):
        _draw_summary(work, results, folder / "summary.png")
    rows = log_file.read_rows(workdir)
    for chart in work.evaluation.charts:
        with plots.optional("a chart of an evaluator"):
            chart(rows, folder)
    with plots.optional(str(folder / "curves.png")):
        plots.curves(rows, folder / "curves.png")
    ends = {row["task"]: row["step"] for row in rows}  # the last row of each task
    for name in work.method.plotted_metrics:
        with plots.optional(str(folder / f"{name}.png")):
            _draw_metric(rows, name, [*ends.values()], folder / f"{name}.png")


def _draw_metric(rows, name, task_ends, path) -> None:
    """Draw a metric over the steps, if the rows have it."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    if points:
        curve = {name: tuple(np.array(points).T)}
        plots.per_step(curve, path, task_ends, ylabel=name.replace("_", " "))


def _draw_summary(work, results, path) -> None:
    """Draw images of the tasks, if they are in memory, above accuracy over tasks."""
    name, curve = None, []
    for key in results["matrices"]:
        matrix = result_file.matrix(results, key)
        means = [row[: t + 1].mean() for t, row in enumerate(matrix)]
        done = [x for x in means if np.isfinite(x)]  # of tasks trained and judged
        is_longer = len(done) > max(len(curve), 1) and done == means[: len(done)]
        if key.endswith("_incremental") and is_longer:
            name, curve = key, done
    if name is None:
        return
    examples = work.stream.dataset.train
    if examples.images is None or examples.images.dtype != np.uint8:
        return
    method, before = work.config["method"], result_file.untrained(results, name)
    curves = {lookup.name_of(method.get("strategy")) or method["name"]: curve}
    curves |= {} if before is None else {"untrained": [before]}
    tasks = work.stream.tasks[:8]
    strips = [_choose_images(examples, task.train.rows) for task in tasks]
    plots.summary(curves, strips, path, title=plots.write_title(name))


def _choose_images(examples, rows) -> list[np.ndarray]:
    """Choose up to eight images of a task, from as many classes and domains as fit."""
    kinds = np.stack([examples.label[rows], examples.domain[rows]])
    first = np.sort(np.unique(kinds, axis=1, return_index=True)[1])
    return [examples.images[row] for row in rows[first[:8]]]
