"""What a run leaves once it is trained: results.json, plasticity, pictures."""

import jax
from etils import epath

from jaxcl import job, plots, record, train


def run(work: job.Job, workdir, *, stop=lambda: False) -> dict:
    """Train (or resume), measure FT_i where asked, write results and plots.

    Returns: the results, see `record.empty`, with "finetune" where measured.
    """
    workdir, step = epath.Path(workdir), job.compile_step(work)
    results = train.run(work, workdir, stop=stop, step=step)
    if work.plasticity and len(work.stream.tasks) > 1:
        alone = train.single_tasks(work, workdir / "single", stop=stop, step=step)
        results["finetune"] = record.plain(alone)
    if jax.process_index() == 0:
        record.write_results(workdir, results)
        if work.plots:
            draw(workdir, results)
    return results


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
