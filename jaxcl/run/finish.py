"""Carry out a run: train or judge, measure plasticity, write results and pictures."""

from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from jaxcl import schema
from jaxcl.evals import plots
from jaxcl.run import (
    cost,
    job,
    lock,
    overview,
    seeds,
    task_alone,
    terminal,
    train,
    transfer,
)
from jaxcl.run import results as results_lib
from jaxcl.run import rows as rows_lib


def run(
    work: job.Job | transfer.Transfer | seeds.Seeds,
    workdir: epath.PathLike,
    *,
    stop: Callable[[], bool] = lambda: False,
    step: Callable | None = None,
) -> dict:
    """Describe the run, train it (or resume), and write results and plots.

    FT_i is measured where the config asks for it.

    Args:
      work: a `job.Job` is trained, a `transfer.Transfer` only evaluated; of a
        `seeds.Seeds` every seed is run.
      workdir: the run directory.
      stop: as in `train.run`.
      step: `job.compile_step(work)`, where several runs share the program.

    Returns:
      The results, see `results.empty`, with "finetune" where measured; for several
      seeds their `seeds.summary`.
    """
    workdir = epath.Path(workdir)
    with lock.held(workdir):
        described = overview.describe_run(work, workdir)
        if jax.process_index() == 0:
            print(described, flush=True)
        if isinstance(work, seeds.Seeds):
            return _seeds(work, workdir, stop)
        return _one(work, workdir, stop, step)


def _one(work, workdir, stop, step):
    """Train or judge one run, write its results and plots."""
    trains = isinstance(work, job.Job)
    if trains:
        results = _trained(work, workdir, stop, step or job.compile_step(work))
    else:
        results = transfer.run(work, workdir, stop=stop)
        if results is None:
            raise train.Interrupted("stopped before the end of the evaluation")
    results |= _identify_data(work)
    if jax.process_index() == 0:
        results_lib.write_results(workdir, results)
        if told := text(results):
            print(told, flush=True)
        if trains and work.logging.plots:
            with plots.written_as(work.logging.plot_formats):
                draw(work, workdir, results)
    return results


def without_lost_rows(
    work: job.Job | transfer.Transfer | seeds.Seeds,
) -> job.Job | transfer.Transfer | seeds.Seeds:
    """The same, to go on where rows of metrics.jsonl are lost; see `Recorder`."""
    if isinstance(work, seeds.Seeds):
        return work._replace(make=lambda seed: without_lost_rows(work.make(seed)))
    if isinstance(work, transfer.Transfer):
        return work._replace(record=work.record | {"lost": True})
    record = work.logging.record | {"lost": True}
    return work._replace(logging=work.logging._replace(record=record))


def _seeds(work, workdir, stop):
    """Run every seed, and summarise their results."""
    if work.side_by_side:
        jobs = {seed: _made(work, seed) for seed in work.seeds}
        whole = seeds.join_jobs(jobs)
        whole = train.run(whole, workdir / "together", stop=stop)
        results = {
            seed: seeds.take_results(whole, i) | _identify_data(jobs[seed])
            for i, seed in enumerate(work.seeds)
        }
        for seed in work.seeds if jax.process_index() == 0 else ():
            results_lib.write_results(workdir / seeds.folder(seed), results[seed])
    else:
        results, step = {}, None
        for seed in work.seeds:
            own = _made(work, seed)
            # The compiled step does not depend on the seed.
            step = step or job.compile_step(own)
            place = workdir / seeds.folder(seed)
            with lock.held(place):
                results[seed] = _one(own, place, stop, step)
    summary = seeds.summary(results)
    if jax.process_index() == 0:
        seeds.write(workdir, summary)
        print(seeds.text(summary), flush=True)
    return summary


def _identify_data(work) -> dict:
    """Say which data a run read: rows of each split, and a digest of all of them."""
    known = work.stream.dataset.known
    if known is None:
        return {}
    rows = {split: len(known.rows(split)) for split in known.splits()}
    return {"data": {"digest": known.digest(), "rows": rows}}


def _made(work, seed):
    """The job of a seed; raises schema.Refused, which names the seed."""
    try:
        return work.make(seed)
    except ValueError as error:
        raise schema.Refused(f"seed {seed}: {error}") from error


def _trained(work, workdir, stop, step):
    """Train, and measure FT_i if the job asks for it."""
    results = train.run(work, workdir, stop=stop, step=step)
    if work.evaluation.alone is not None:
        alone = single_tasks(work, workdir / "single", stop=stop, step=step)
        results["finetune"] = results_lib.plain(alone)
    return results


def single_tasks(
    work: job.Job, workdir: epath.Path, *, stop: Callable[[], bool], step: Callable
) -> dict[str, list]:
    """FT_i: accuracy on task i of the method trained on task i alone.

    Each task is a run of its own inside `workdir`, which stays there: it resumes and is
    not trained twice. A task that the cache of `work.alone` holds is not trained.

    Args:
      work: the run on all tasks.
      workdir: where the runs on single tasks go.
      stop: as in `train.run`.
      step: the compiled step of `work`, shared if both use the same method.

    Returns:
      Matrix name -> FT of each task, f64[T]; None of tasks that are not trained.
    """
    alone, tasks = work.evaluation.alone, work.stream.tasks
    accuracies, ready = {}, None
    for i, task in enumerate(tasks[: work.loop.first_tasks]):
        accuracy = task_alone.read(alone, i)
        if accuracy is None:
            if ready is None:
                single = alone.make(work)
                same = single.method is work.method
                ready = single, step if same else job.compile_step(single)
            accuracy = _single_task(*ready, i, task, workdir, stop)
            task_alone.write(alone, i, accuracy)
        elif jax.process_index() == 0:
            print(f"FT of {task.name}: from {task_alone.path(alone, i)}", flush=True)
        for name, value in accuracy.items():
            accuracies.setdefault(name, [None] * len(tasks))[i] = value
    return accuracies


def _single_task(single, step, i, task, workdir, stop):
    """Matrix name -> FT of task i, trained now or resumed."""
    tasks = single.stream._replace(tasks=(task._replace(index=0),))
    evaluators = {
        name: lambda state, _, judge=judge: judge(state, i)
        for name, judge in single.evaluation.evaluators.items()
    }
    own = {"tensorboard": False, "loggers": (), "progress": False}
    record = single.logging.record | own
    only = single._replace(
        data=single.data._replace(stream=tasks),
        loop=single.loop._replace(start=None),  # not what another run has trained
        evaluation=single.evaluation._replace(evaluators=evaluators),
        logging=single.logging._replace(quiet=True, record=record),
    )
    results = train.run(only, workdir / f"task_{i}", stop=stop, step=step)
    return {name: matrix[0][i] for name, matrix in results["matrices"].items()}


def text(results: dict) -> str:
    """The measures of a run, one line per matrix, in percent."""
    keys = ("average_accuracy", "forgetting", "stability", "plasticity")
    titles = ("average", "forgetting", "stability", "plasticity", "untrained")
    lines = []
    if results["matrices"]:
        heads = (f"{title:>12}" for title in titles)
        lines = [f"{'after the last task (%)':28}" + "".join(heads)]
    for name, measures in results_lib.summary(results).items():
        values = [measures.get(key) for key in keys]
        before = np.array(results.get("untrained", {}).get(name, []), float)
        judged = before[~np.isnan(before)]
        values.append(float(judged.mean()) if judged.size else None)
        cells = (f"{'-':>12}" if v is None else f"{100 * v:12.1f}" for v in values)
        lines.append(f"{name:28}" + "".join(cells))
    if results["cost"]["total"] is not None:
        lines.append(cost.line(results["cost"]))
    return "\n".join(lines)


def closing(
    work: job.Job | transfer.Transfer | seeds.Seeds,
    workdir: epath.PathLike,
    results: dict,
) -> str:
    """Say what a run reached, where its files lie, and which commands come next.

    Args:
      work: what `run` carried out.
      workdir: the run directory.
      results: what `run` returned.
    """
    where, lines = epath.Path(workdir), []
    one = not isinstance(work, seeds.Seeds)
    if one and (reached := _reached(results)):
        lines = [terminal.paint(reached, "strong")]
    inner = where if one else where / "seed_N"
    lines.append(f"Results   {where / results_lib.RESULTS if one else inner}")
    pictures = where / "plots"
    if pictures.exists():
        first = "summary.png"
        hint = f" ({first} first)" if (pictures / first).exists() else ""
        lines.append(f"Pictures  {pictures}{hint}")
    commands = [f"jaxcl report {where} --out={where / 'report.html'}"]
    if isinstance(work, job.Job):
        commands.append(f"jaxcl export --run={where} --out=encoder")
        updates = work.config["method"]["name"] == "two_view"
        commands.append(
            f"jaxcl update --run={where} --data=NEW_IMAGES"
            if updates
            else f"jaxcl compare OTHER_RUN {where}"
        )
    heads = ["Next", *[""] * len(commands)]
    lines += [f"{head:9} {x}" for head, x in zip(heads, commands, strict=False)]
    return "\n".join(lines)


def _reached(results) -> str:
    """Say the accuracy of a run beside the untrained network's; "" without one."""
    measured = results_lib.summary(results)
    names = [name for name in measured if not name.endswith("/task_aware")]
    name = next((x for x in names if x.startswith("predict/")), [*names, None][0])
    if name is None or measured[name]["average_accuracy"] is None:
        return ""
    said = f"Reached   {100 * measured[name]['average_accuracy']:.1f} % ({name})"
    before = np.array(results.get("untrained", {}).get(name, []), float)
    if np.isfinite(before).any():
        said += f", untrained {100 * np.nanmean(before):.1f} %"
    if measured[name].get("forgetting") is not None:
        said += f", forgetting {100 * measured[name]['forgetting']:.1f} points"
    return said


def draw(work: job.Job, workdir: epath.PathLike, results: dict) -> None:
    """Draw a run that is over, in `workdir/plots`.

    Accuracy matrices, training curves, the charts of its evaluators, and the metrics
    that its method wants drawn.
    """
    folder = epath.Path(workdir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for name in results["matrices"]:
        matrix = results_lib.matrix(results, name)
        path = folder / f"{name.replace('/', '_')}.png"
        plots.accuracy_matrix(
            matrix, path, title=plots.words(name), task_names=results["task_names"]
        )
    _draw_summary(work, results, folder / "summary.png")
    rows = rows_lib.read(workdir)
    for chart in work.evaluation.charts:
        chart(rows, folder)
    plots.curves(rows, folder / "curves.png")
    ends = {row["task"]: row["step"] for row in rows}  # the last row of each task
    for name in work.method.drawn:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            curve = {name: tuple(np.array(points).T)}
            label = name.replace("_", " ")
            path = folder / f"{name}.png"
            plots.per_step(curve, path, list(ends.values()), ylabel=label)


def _draw_summary(work, results, path) -> None:
    """Draw images of tasks that lie in memory, and accuracy over tasks below."""
    name, met = None, []
    for key in results["matrices"]:
        means = [
            row[: t + 1].mean()
            for t, row in enumerate(results_lib.matrix(results, key))
        ]
        done = [x for x in means if np.isfinite(x)]  # of tasks trained and judged
        if key.endswith("_incremental") and len(done) > max(len(met), 1):
            if done == means[: len(done)]:
                name, met = key, done
    examples = None if name is None else work.stream.dataset.train
    images = None if examples is None else examples.images
    if images is None or images.shape[-1] not in (1, 3):
        return
    method = work.config["method"]
    curves = {method.get("strategy") or method["name"]: met}
    before = np.array(results.get("untrained", {}).get(name, []), float)
    if np.isfinite(before).any():
        curves["untrained"] = [np.nanmean(before)]
    strips = [
        _choose_images(examples, task.train.rows) for task in work.stream.tasks[:8]
    ]
    plots.summary(curves, strips, path, title=plots.words(name))


def _choose_images(examples, rows) -> list[np.ndarray]:
    """Return up to eight images of a task, of as many classes and domains as fit."""
    kinds = np.stack([examples.label[rows], examples.domain[rows]])
    first = np.sort(np.unique(kinds, axis=1, return_index=True)[1])
    return [examples.images[row] for row in rows[first[:8]]]
