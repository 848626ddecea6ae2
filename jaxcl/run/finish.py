"""What a run leaves once it is trained: results.json, plasticity, pictures."""

import jax
import numpy as np
from etils import epath

from jaxcl import plots
from jaxcl.evals import filtering, memory, spread
from jaxcl.run import cost, job, record, seeds, task_alone, train, transfer
from jaxcl.run import results as results_lib

# Metrics of steps that have a picture each, see methods/online/probe.py.
MEASURED = ("drift", "feature_gradient_norm", "prototype_gradient_norm")


def run(
    work: job.Job | transfer.Transfer | seeds.Seeds,
    workdir,
    *,
    stop=lambda: False,
    step=None,
) -> dict:
    """Train (or resume), measure FT_i where asked, write results and plots.

    A `transfer.Transfer` trains nothing, and is judged; of `seeds.Seeds` each is run.

    Args:
      step: `job.compile_step(work)`, where several runs share the program.

    Returns: the results, see `results.empty`, with "finetune" where measured; of
      several seeds their `seeds.summary`.
    """
    workdir = epath.Path(workdir)
    if isinstance(work, seeds.Seeds):
        return _seeds(work, workdir, stop)
    trains = isinstance(work, job.Job)
    if trains:
        results = _trained(work, workdir, stop, step or job.compile_step(work))
    else:
        results = _judged(work, workdir, stop)
    if jax.process_index() == 0:
        results_lib.write_results(workdir, results)
        print(text(results), flush=True)
        if trains and work.plots:
            draw(workdir, results)
    return results


def _seeds(work, workdir, stop):
    """Every seed, and what they say together."""
    if work.side_by_side:
        jobs = {seed: work.make(seed) for seed in work.seeds}
        whole = train.run(seeds.together(jobs), workdir / "together", stop=stop)
        results = seeds.apart(whole, work.seeds)
        for seed in work.seeds if jax.process_index() == 0 else ():
            results_lib.write_results(workdir / seeds.folder(seed), results[seed])
    else:
        results, step = {}, None
        for seed in work.seeds:
            one = work.make(seed)
            # Nothing that is compiled depends on the seed.
            step = step or job.compile_step(one)
            results[seed] = run(one, workdir / seeds.folder(seed), stop=stop, step=step)
    found = seeds.summary(results)
    if jax.process_index() == 0:
        seeds.write(workdir, found)
        print(seeds.text(found), flush=True)
    return found


def _trained(work, workdir, stop, step):
    results = train.run(work, workdir, stop=stop, step=step)
    if work.alone is not None:
        alone = single_tasks(work, workdir / "single", stop=stop, step=step)
        results["finetune"] = results_lib.plain(alone)
    return results


def _judged(work, workdir, stop):
    def pause():
        if stop():
            raise train.Interrupted("stopped before the end of the evaluation")

    return transfer.run(work, workdir, pause=pause)


def single_tasks(work: job.Job, workdir, *, stop, step) -> dict[str, list]:
    """FT_i: accuracy on task i of the method trained on task i alone.

    Each task is a run of its own in `workdir`, kept, so that it resumes and is
    not trained twice; what `work.alone` keeps already is not trained at all.

    Args:
      step: the compiled step of `work`, shared where the methods are one.

    Returns: name of the matrix -> f64[T].
    """
    tasks, alone, ready = work.stream.tasks, {}, None
    for i, task in enumerate(tasks):
        found = task_alone.read(work.alone, i)
        if found is None:
            if ready is None:
                made = work.alone.make()
                same = made.method is work.method
                ready = made, step if same else job.compile_step(made)
            found = _single_task(*ready, i, task, workdir, stop)
            task_alone.write(work.alone, i, found)
        elif jax.process_index() == 0:
            print(
                f"FT of {task.name}: from {task_alone.path(work.alone, i)}", flush=True
            )
        for name, value in found.items():
            alone.setdefault(name, [None] * len(tasks))[i] = value
    return alone


def _single_task(made, step, i, task, workdir, stop):
    """Name of the matrix -> FT of task i, trained now or resumed."""
    only = made._replace(
        stream=made.stream._replace(tasks=(task._replace(index=0),)),
        evaluators={
            name: lambda state, _, judge=judge: judge(state, i)
            for name, judge in made.evaluators.items()
        },
        pictures={},
        evaluate_untrained=False,
        quiet=True,
        record={"tensorboard": False, "progress": False},
    )
    results = train.run(only, workdir / f"task_{i}", stop=stop, step=step)
    return {name: matrix[0][i] for name, matrix in results["matrices"].items()}


def text(results: dict) -> str:
    """The measures of a run, one line per matrix, in percent."""
    keys = ("average_accuracy", "forgetting", "stability", "plasticity")
    titles = ("average", "forgetting", "stability", "plasticity", "untrained")
    lines = [f"{'after the last task (%)':28}" + "".join(f"{t:>12}" for t in titles)]
    for name, measures in results_lib.summary(results).items():
        values = [measures.get(key) for key in keys]
        before = results.get("untrained", {}).get(name)
        values.append(
            None if before is None else float(np.nanmean(np.array(before, float)))
        )
        cells = (f"{'-':>12}" if v is None else f"{100 * v:12.1f}" for v in values)
        lines.append(f"{name:28}" + "".join(cells))
    if results["cost"]["total"] is not None:
        lines.append(cost.line(results["cost"]))
    return "\n".join(lines)


def draw(workdir, results: dict) -> None:
    """Accuracy matrices, curves and what was measured, as PNG in `workdir/plots`."""
    folder = epath.Path(workdir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for name in results["matrices"]:
        matrix = results_lib.matrix(results, name)
        path = folder / f"{name.replace('/', '_')}.png"
        plots.accuracy_matrix(
            matrix, path, title=name, task_names=results["task_names"]
        )
    rows = record.read_rows(workdir)
    memory.draw(rows, folder)
    spread.draw(rows, folder)
    filtering.draw(rows, folder)
    plots.curves(rows, folder / "curves.png")
    ends = {row["task"]: row["step"] for row in rows}  # the last row of each task
    for name in MEASURED:
        found = [(row["step"], row[name]) for row in rows if name in row]
        if found:
            curve = {name: tuple(np.array(found).T)}
            label = name.replace("_", " ")
            path = folder / f"{name}.png"
            plots.per_step(curve, path, list(ends.values()), ylabel=label)
