"""DUEL's policy by itself: what it keeps of an uneven stream on an even network.

  python benchmarks/trials/duel_policy.py --data=mnist.npz --out=runs/trials/duel

MoCo is trained on the even stream for 600 steps, so that it has classes to tell apart.
Then its networks stand still, and a memory of 1024 is offered 5,120 rows of a stream in
which class 0, 1 or 2 has probability 0.5, 0.75 or 0.9. First in, first out keeps the
stream's entropy; the policy's memory is more even if it does what the paper says.
The even runs are those that `duel_warm_start.py` goes on from.
"""

import functools
import pathlib
import sys

import jax
import numpy as np
import runs

from jaxcl import core
from jaxcl.config import build
from jaxcl.data import imbalance
from jaxcl.evals import embedding
from jaxcl.memory import duel
from jaxcl.run import finish, log_file, result_file

CONFIG = "duel_cifar10_small"
RHO = (0.5, 0.75, 0.9)
DOMINANT = (0, 1, 2)
SIZE, BATCH = 1024, 128
GRAY = {
    "augment.mean": (0.13,),
    "augment.std": (0.31,),
    "augment.jitter": (0.3, 0.3, 0.0, 0.0),
    "augment.grayscale": 0.0,
    "augment.flip": 0.0,
    "augment.scale": (0.4, 1.0),
}


def config_of(options, row: str, seed: int, rho=(0.1, 0.75), **changes):
    """Read the config of a row: an even task, then one that class `seed` dominates."""
    gray = GRAY if options.gray else {}
    steps = min(options.steps, 100)
    size = {"epochs": options.steps // steps, "scenario.imbalance.epoch_steps": steps}
    return runs.read_config(
        f"{CONFIG}:{row},warm",
        gray
        | size
        | {
            "data": {"name": "npz", "path": options.data},
            "scenario.imbalance.rho_max": rho,
            "scenario.imbalance.dominant": seed % 10,
            "evaluate_untrained": False,
            "eval_every": 0,
            "save_every": 200,
            "evaluators": {
                "knn": {"k": 20},
                "linear": {"preset": "duel", "epochs": 20},
                "spread": {"features": "projection"},
                "memory": {},
            },
        }
        | changes,
        seed,
    )


def scalars(folder) -> dict:
    """Read what the last evaluation of a run measured; accuracies in percent."""
    results = result_file.read_results(folder)
    task = result_file.count_finished(results) - 1
    rows = log_file.read_rows(folder)
    last = [row["eval"] for row in rows if "eval" in row][-1]
    found = {
        "knn": 100 * result_file.matrix(results, "knn/class_incremental")[task, 0],
        "linear": 100 * last["linear/accuracy"],
        "entropy": last["memory/entropy"],
        "stream": last["memory/stream_entropy"],
        "intra": last["spread/intra_class_variance"],
        "inter": last["spread/inter_class_similarity"],
    }
    found |= {k: v for k, v in last.items() if k.startswith("policy")}
    return found


def even_folder(options, seed: int) -> pathlib.Path:
    """Name the run directory of a seed's even task."""
    return pathlib.Path(options.out) / "even" / f"seed_{seed}"


def policy(made):
    """Make an evaluator of each dominant class and share, on rows of the first task."""
    stream, augment = made.data.stream, made.config["augment"]
    train = stream.dataset.train
    parts = core.EvalParts(
        embed=made.method.embed,
        project=made.method.project,
        stream=stream,
        num_classes=len(stream.dataset.class_names),
        size=augment["size"],
        mean=tuple(augment["mean"]),
        std=tuple(augment["std"]),
        resize=augment["resize"],
        seed=made.data.seed,
        mesh=made.mesh,
        workers=0,
    )
    embed = embedding.make_embedder(
        embedding.select_features(parts, "policy", "projection"), train
    )
    choose = jax.jit(duel.select)

    def evaluate(state, task):
        found, rows = np.asarray(embed(state)), stream.tasks[0].train.rows
        unit = found / np.linalg.norm(found, axis=1, keepdims=True)
        scalars = {}
        for rho in RHO:
            for dominant in DOMINANT:
                draw = imbalance.Dominated(
                    train.label, dominant, rho, 5 * SIZE // BATCH
                )
                rng = np.random.default_rng([made.data.seed, dominant])
                offered = draw(rng, rows, BATCH).reshape(-1)
                held = offered[:SIZE]
                for first in range(SIZE, len(offered), BATCH):
                    new = offered[first : first + BATCH]
                    keep = np.asarray(choose(unit[held], unit[new]))
                    held = np.concatenate([held, new])[keep]
                name = f"{rho}_{dominant}"
                scalars[f"{name}/fifo"] = entropy(train.label[offered[-SIZE:]])
                scalars[f"{name}/duel"] = entropy(train.label[held])
                share = np.mean(train.label[held] == dominant)
                scalars[f"{name}/dominant"] = float(share)
        return core.Result({}, scalars)

    return evaluate


def entropy(labels) -> float:
    """Compute the entropy of the classes among labels, in nats."""
    share = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-np.sum(share * np.log(share)))


def train_even(options, seed: int, stop) -> pathlib.Path:
    """Train a seed's even task and measure the policy on it; return its directory."""
    folder = even_folder(options, seed)
    if result_file.complete(folder):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    made = build.build(config_of(options, "moco", seed, first_tasks=1), folder)
    judges = made.evaluation.evaluators | {"policy": policy(made)}
    made = made._replace(evaluation=made.evaluation._replace(evaluators=judges))
    finish.run_job(made, folder, stop=stop)
    return folder


def parser(text, name):
    """Make the options of both trials of DUEL."""
    files = ".npz with train_x, train_y, test_x, test_y"
    made = runs.parser(text, name, (0, 5), files)
    add = made.add_argument
    add("--colour", dest="gray", action="store_false", help="images of three channels")
    add("--steps", type=int, default=600, help="of each task")
    return made


def tell(found) -> None:
    """Print the entropies after five sizes of the memory, and how many rose."""
    of_all = found.get("even", {})
    rose = []
    print("| rho | class |", " | ".join(f"seed {seed}" for seed in of_all), "|")
    print("|---" * (2 + len(of_all)) + "|")
    for rho in RHO:
        for dominant in DOMINANT:
            name = f"policy/{rho}_{dominant}"
            cells = []
            for run in of_all.values():
                before, after = run[f"{name}/fifo"], run[f"{name}/duel"]
                rose.append(after > before)
                cells.append(f"{before:.2f} -> {after:.2f}")
            print(f"| {rho} | {dominant} |", " | ".join(cells), "|")
    print(f"more even in {sum(rose)} of {len(rose)}")


def main(argv=None) -> int:
    """The command."""
    options = parser(__doc__, "duel").parse_args(argv)

    def work(stop):
        def measure(seed):
            return scalars(train_even(options, seed, stop))

        seeds = range(*options.seeds)
        plan = (("even", s, functools.partial(measure, s)) for s in seeds)
        runs.work_through(f"{options.out}/policy", plan)

    if options.table:
        tell(runs.read(f"{options.out}/policy"))
        return 0
    return runs.main(options, work, lambda _: tell(runs.read(f"{options.out}/policy")))


if __name__ == "__main__":
    sys.exit(main())
