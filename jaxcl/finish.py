"""What a run leaves once it is trained: results.json, plasticity, pictures."""

import jax
import numpy as np
from etils import epath

from jaxcl import job, plots, record, train


def run(work: job.Job, workdir, *, stop=lambda: False) -> dict:
    """Train (or resume), measure FT_i where asked, write results and plots.

    Returns: the results, see `record.empty`, with "finetune" where measured.
    """
    workdir, step = epath.Path(workdir), job.compile_step(work)
    results = train.run(work, workdir, stop=stop, step=step)
    if work.plasticity and len(work.stream.tasks) > 1:
        alone = single_tasks(work, workdir / "single", stop=stop, step=step)
        results["finetune"] = record.plain(alone)
    if jax.process_index() == 0:
        record.write_results(workdir, results)
        print(text(results), flush=True)
        if work.plots:
            draw(workdir, results)
    return results


def single_tasks(work: job.Job, workdir, **options) -> dict[str, list]:
    """FT_i: accuracy on task i of the method trained on task i alone.

    Each task is a run of its own in `workdir`, kept, so that it resumes and is
    not trained twice.

    Returns: name of the matrix -> f64[T].
    """
    tasks, alone = work.stream.tasks, {}
    for i, task in enumerate(tasks):
        only = work._replace(
            stream=work.stream._replace(tasks=(task._replace(index=0),)),
            evaluators={
                name: lambda state, _, judge=judge, i=i: judge(state, i)
                for name, judge in work.evaluators.items()
            },
            pictures={},
            evaluate_untrained=False,
            quiet=True,
            record={"tensorboard": False, "progress": False},
        )
        results = train.run(only, epath.Path(workdir) / f"task_{i}", **options)
        for name, matrix in results["matrices"].items():
            alone.setdefault(name, [None] * len(tasks))[i] = matrix[0][i]
    return alone


def text(results: dict) -> str:
    """The measures of a run, one line per matrix, in percent."""
    keys = ("average_accuracy", "forgetting", "stability", "plasticity")
    titles = ("average", "forgetting", "stability", "plasticity", "untrained")
    lines = [f"{'after the last task (%)':28}" + "".join(f"{t:>12}" for t in titles)]
    for name, measures in record.summary(results).items():
        values = [measures.get(key) for key in keys]
        before = results.get("untrained", {}).get(name)
        values.append(
            None if before is None else float(np.nanmean(np.array(before, float)))
        )
        cells = (f"{'-':>12}" if v is None else f"{100 * v:12.1f}" for v in values)
        lines.append(f"{name:28}" + "".join(cells))
    return "\n".join(lines)


def draw(workdir, results: dict) -> None:
    """Accuracy matrices and training curves as PNG in `workdir/plots`."""
    folder = epath.Path(workdir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for name in results["matrices"]:
        matrix = record.matrix(results, name)
        path = folder / f"{name.replace('/', '_')}.png"
        plots.accuracy_matrix(
            matrix, path, title=name, task_names=results["task_names"]
        )
    plots.curves(record.read_rows(workdir), folder / "curves.png")
