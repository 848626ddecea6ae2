"""Run directories that no training made, so that a test has one at once."""

import contextlib
import hashlib
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from helpers import toy
from jaxcl import core, sharding
from jaxcl.run import checkpoint, cost, job, result_file

NAME = "predict/class_incremental"


def write(folder, config, rows, results):
    """Write the files of a run."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    result_file.write_results(folder, results)


def leave(folder, matrix, *, seed, milliseconds=10.0, flops=100, matrix_name=NAME):
    """A finished run of two tasks, with an evaluation in the middle of the second."""
    results = result_file.empty_results(2)
    for task, row in enumerate(matrix):
        results = result_file.add_task(results, task, {matrix_name: row}, {}, 1.0)
        seconds = {"train": 5 * milliseconds / 1000}
        machine = {"device": "cpu", "num_devices": 1, "peak_bytes": None}
        spent = cost.TaskCost(5, 50, flops, seconds, machine)
        results["cost"] = cost.add_task(results["cost"], task, spent)
    first = {"memory/entropy": 0.9 + 0.1 * seed}
    last = {"memory/entropy": 2.0, "spread/intra_0": 0.1 + 0.1 * seed}
    last |= {"spread/intra_1": 0.4, "spread/inter_0": 0.1, "spread/inter_1": 0.3}
    rows = [
        {"step": 5, "task": 0, "eval": {matrix_name: matrix[0]} | first},
        {"step": 7, "task": 1, "loss": 1.0},
        {"step": 8, "task": 1, "eval": {matrix_name: [0.5, 0.1]}},
        {"step": 10, "task": 1, "eval": {matrix_name: matrix[1]} | last},
    ]
    write(folder, {"seed": seed}, rows, results)


def leave_epochs(
    folder, values, *, best, seed=0, growth=0.5, seconds=1.0, passes=100.0, svm=0.5
):
    """A finished run: epoch i of task 1 ends at step 10 + 5 i with values[i - 1].

    The loss of task 0's end, 0.01, is below every target; so are those of steps that
    end no epoch.
    """
    scenario = {"name": "growth", "growth": growth}
    config = {"seed": seed, "patience": 2, "scenario": scenario, "plasticity": False}
    rows = [
        {
            "step": 10,
            "task": 0,
            "epoch": {"number": 1, "loss": 9.0, "passes": 7.0},
            "time": {"train": 0.5},
        },
        {"step": 10, "task": 0, "eval": {"objective/loss": 0.01}},
        {"step": 12, "task": 1, "loss": 1.0},
        {"step": 13, "task": 1, "eval": {"objective/loss": 0.02}},
    ]
    epochs = []
    for number, value in enumerate(values, 1):
        epoch = {"number": number, "loss": 2.0, "passes": passes * number}
        now = seconds * number
        epochs.append({**epoch, "seconds": now})
        step = 10 + 5 * number
        rows.append({"step": step, "task": 1, "epoch": epoch, "time": {"train": now}})
        measures = {"objective/loss": value, "knn/class_incremental": [0.5, 0.5]}
        rows.append({"step": step, "task": 1, "eval": measures})
    results = result_file.add_task(
        result_file.empty_results(2), 0, {}, {"objective/loss": 0.01}, 1.0
    )
    ends = {"svm/all": svm, "svm/old": svm + 0.1, "svm/new": svm - 0.1, "knn/x": 7.0}
    results = result_file.add_task(results, 1, {}, ends, 1.0)
    pair = {"best": epochs[best - 1], "last": epochs[-1]}
    zero = {"number": 1, "loss": 9.0, "seconds": 0.5, "passes": 7.0}
    results["convergence"] = {"0": {"best": zero, "last": zero}, "1": pair}
    write(folder, config, rows, results)


RESNET = {"name": "resnet", "depth": 10, "width": 4, "stem_padding": 2}


def random_state(work, seed=0):
    """A state that no training made: any numbers in the shapes of the method's."""
    rng = np.random.default_rng(seed)

    def number(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, toy.KEY):
            keys = [jax.random.key(i) for i in range(max(leaf.size, 1))]
            return jnp.stack(keys).reshape(leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.uniform(0.2, 0.7, leaf.shape), leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    state = jax.tree.map(number, job.shapes(work.method, work.data)[0])
    params = jax.tree.map(lambda x: x - 0.45 if x.ndim > 1 else x, state.params)
    return state.replace(step=jnp.int32(7), params=params)


def results_of(work, done=1):
    """As they are after `done` tasks."""
    names = work.data.task_names
    results = result_file.empty_results(
        len(names), task_names=names, embeds=work.method.embeds
    )
    for task in range(done):
        row = np.where(np.arange(len(names)) <= task, 0.5 + 0.1 * task, np.nan)
        results = result_file.add_task(
            results, task, {"knn/x": row}, {"knn/loss": 1.5}, 1.0
        )
    return results


def save(work, workdir, state, *, number=9, phase="evaluated", done=1, results=None):
    cursor = {"phase": phase, "results": results or results_of(work, done)}
    with contextlib.closing(checkpoint.Checkpoints(workdir / "checkpoints")) as there:
        there.save(number, state, cursor)


def untraced():
    """Jobs that are built in this context trace no step, which takes its time."""
    return mock.patch.object(job, "trace_step", lambda work: work)


def untried(workdir, **changes):
    """A job of which no step is traced; nothing else of it changes."""
    with untraced():
        return toy.job(workdir, **changes)


def run_of(workdir, **changes):
    """A run directory with one checkpoint of any numbers; its job and its state."""
    work = untried(workdir, **changes)
    state = random_state(work)
    save(work, workdir, state)
    return work, state


def eval_parts(work):
    """What an evaluator of the toy's run is given."""
    return core.EvalParts(
        embed=work.method.embed,
        stream=work.stream,
        num_classes=10,
        size=8,
        mean=(0.3,),
        std=(0.4,),
        resize=None,
        seed=0,
        mesh=sharding.mesh(1),
        workers=0,
    )


def contents(folder):
    """Name below the folder -> checksum, of every file."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
