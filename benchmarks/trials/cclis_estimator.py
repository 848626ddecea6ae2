r"""CCLIS's Theorem 1, measured: how well stored rows stand for the rows that are gone.

  python benchmarks/trials/cclis_estimator.py --data=data/cifar10 --out=runs/estimator

A network learns the first two classes of CIFAR-10. The second task has two more. An
anchor is then pushed from the mean of all rows under its softmax (Li et al., 2024, Eq.
7). Batches with few stored rows estimate this mean, with the gradient of `sample_nce`.
The table has the squared error over the squared true mean, for each choice of the
memory and each scope of the weights. With `--spread 0.6` rows are those of four
clusters of that spread in 32 dimensions, in place of a network's: seconds.
"""

import functools
import pathlib
import sys
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import runs

from jaxcl.config import build
from jaxcl.data.augment import images as augment_images
from jaxcl.losses import prototype
from jaxcl.nets import mlp
from jaxcl.run import checkpoint, job

TAU, STORED, OLD, NEW = 0.5, 100, (0, 1), (2, 3)
CHOICES = ("importance", "uniform")


def main(argv=None) -> int:
    """The command."""
    made = runs.parser(__doc__, "cclis_estimator", (0, 5))
    made.add_argument("--data", help="config.data.path, for networks")
    made.add_argument("--per-class", type=int, default=1000)
    made.add_argument("--epochs", type=int, default=15)
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--draws", type=int, default=200)
    made.add_argument("--spread", type=float)
    options = made.parse_args(argv)

    def work(stop):
        runs.work_through(options.out, plan(options, stop))

    return runs.main(options, work, tell)


def plan(options, stop):
    """List the runs: one of each seed."""
    for seed in range(*options.seeds):
        if options.spread is not None:
            yield "errors", seed, functools.partial(of_clusters, options, seed)
        else:
            yield "errors", seed, functools.partial(of_network, options, seed, stop)


def tell(found) -> None:
    """Print the measures over the seeds: mean and 95 % interval."""
    of_seeds = [*found.get("errors", {}).values()]
    for name in of_seeds[0] if of_seeds else ():
        mean, low, high = runs.interval([run[name] for run in of_seeds])
        print(f"{name}: {mean:.4f} ({low:.4f} to {high:.4f}), {len(of_seeds)} seeds")


def of_clusters(options, seed) -> dict:
    """Estimate with unit rows around the prototypes."""
    rng = np.random.default_rng(seed)
    c = rng.normal(size=(4, 32))
    label = np.repeat(np.arange(4), options.per_class)
    z = c[label] + options.spread * rng.normal(size=(len(label), 32))
    z, c = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (z, c))
    return errors(z, label, c, options, rng)


def of_network(options, seed, stop) -> dict:
    """Estimate with a network that learnt the first two classes."""
    changes = {
        "data.path": options.data,
        "scenario.per_class": options.per_class,
        "epochs": options.epochs,
        "first_tasks": 1,
        "evaluators": {},
    }
    words = "configs/cclis_cifar10_small.py:neither"
    config = runs.read_config(words, changes, seed, options.set)
    folder = pathlib.Path(options.out) / f"seed_{seed}"
    runs.train(config, folder, stop)
    made = build.build(config, folder)
    saved = checkpoint.Checkpoints(folder / "checkpoints", keep=made.loop.keep)
    state = saved.restore(job.initial_state(made)).state
    examples = made.data.stream.dataset.train
    rows = np.flatnonzero(np.isin(examples.label, OLD + NEW))
    names = "size", "resize", "mean", "std"
    view = augment_images.make_eval(**{name: config.augment[name] for name in names})
    pieces = [view(examples.images[part]) for part in np.array_split(rows, 8)]
    features = [made.method.embed(state, piece) for piece in pieces]
    z = mlp.MLP((config.method.hidden_dim, 128))
    z = z.apply({"params": state.params["projector"]}, jnp.concatenate(features))
    z = np.asarray(z / jnp.linalg.norm(z, axis=1, keepdims=True), np.float64)
    c = np.asarray(state.params["prototypes"], np.float64)
    c /= np.linalg.norm(c, axis=1, keepdims=True)
    return errors(z, examples.label[rows], c, options, np.random.default_rng(seed))


def errors(z, label, c, options, rng) -> dict:
    """Compare each choice and scope with all rows."""
    mass = np.exp(c[list(OLD)] @ z.T / TAU)
    wanted = mass @ z / mass.sum(axis=1, keepdims=True)
    pools = {m: np.flatnonzero(label == m) for m in OLD + NEW}
    other = [pools[1 - m] for m in OLD]
    found = {
        "true share of old negatives": np.mean(
            [mass[m, other[m]].sum() / mass[m].sum() for m in OLD]
        )
    }
    chances = {name: chance_of(name, z, label, c, pools) for name in CHOICES}
    old = round(options.batch * len(OLD) * STORED / (len(OLD) * STORED + len(z) / 2))
    errors_of = {}
    for _ in range(options.draws):
        new = rng.choice(
            np.concatenate([pools[m] for m in NEW]), options.batch - old, replace=False
        )
        for choice, g in chances.items():
            stored = np.concatenate(
                [
                    rng.choice(pools[m], STORED, replace=False, p=g[pools[m]])
                    for m in OLD
                ]
            )
            at = np.concatenate([rng.choice(stored, old, replace=False), new])
            batch = jnp.float32(z[at]), jnp.int32(label[at]), jnp.float32(g[at])
            for scope in get_args(prototype.Scope):
                got = np.asarray(push(*batch, jnp.float32(c), scope=scope), float)
                there = [m for m in OLD if (label[at] == m).any()]
                error = np.square(got[there] - wanted[there]).sum(axis=1)
                error = np.mean(error / np.square(wanted[there]).sum(axis=1))
                errors_of.setdefault(f"{choice}, {scope}", []).append(error)
    return found | {name: float(np.mean(values)) for name, values in errors_of.items()}


def chance_of(choice, z, label, c, pools):
    """Probability of each row in a draw from its class's pool, f64[N]."""
    if choice == "uniform":
        return np.array([1 / len(pools[m]) for m in label])
    seen = jnp.arange(len(c)) < 2
    old = np.isin(label, OLD)  # scores are taken when the first task ends
    g = np.array([1 / len(pools[m]) for m in label])
    g[old] = prototype.proposal(
        jnp.float32(z[old]), jnp.int32(label[old]), jnp.float32(c), seen
    )
    for m in OLD:
        g[pools[m]] /= g[pools[m]].sum()
    return g


@functools.partial(jax.jit, static_argnames="scope")
def push(z, y, g, c, scope):
    """Read the estimate of Eq. 7 off the gradient in the old prototypes."""
    old = jnp.arange(len(c)) < 2

    def loss(c):
        return prototype.sample_nce(z, y, c, g, old, temperature=TAU, scope=scope)

    own = y == jnp.array(OLD)[:, None]
    count = jnp.maximum(own.sum(axis=1, keepdims=True), 1)
    return jax.grad(loss)(c)[:2] * TAU * len(y) / count + own @ z / count


if __name__ == "__main__":
    sys.exit(main())
