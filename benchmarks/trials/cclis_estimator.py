r"""CCLIS's Theorem 1, measured: how well stored rows stand for the rows that are gone.

  python benchmarks/trials/cclis_estimator.py --data=data/cifar10 --out=runs/estimator

A network learns the first two classes of CIFAR-10. The second task has two more. An
anchor is then pushed from the mean of all rows under its softmax (Li et al., 2024, Eq.
7). Batches with few stored rows estimate this mean, with the gradient of `sample_nce`.
OUT/estimator.json has the squared error over the squared true mean, for each choice of
the memory and each scope of the weights. With `--spread 0.6` rows are those of four
clusters of that spread in 32 dimensions, in place of a network's: seconds.
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import trial

from jaxcl.data import storage
from jaxcl.data.augment import images as augment_images
from jaxcl.losses import prototype
from jaxcl.nets import mlp
from jaxcl.run import checkpoint, job

TAU, STORED, OLD, NEW = 0.5, 100, (0, 1), (2, 3)
CHOICES = ("importance", "uniform")


def main():
    """Train, estimate, and write the errors."""
    parser = trial.parser(__doc__)
    parser.add_argument("--per-class", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--spread", type=float)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = of_networks(options) if options.spread is None else of_clusters(options)
    found = {"found": trial.summary(found)}
    trial.save(options.out / "estimator.json", trial.settings(options) | found)


def of_clusters(options) -> list[dict]:
    """Estimate with unit rows around the prototypes, for each seed."""
    found = []
    for seed in range(options.seeds):
        rng = np.random.default_rng(seed)
        c = rng.normal(size=(4, 32))
        label = np.repeat(np.arange(4), options.per_class)
        z = c[label] + options.spread * rng.normal(size=(len(label), 32))
        z, c = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (z, c))
        found.append(errors(z, label, c, options, rng))
    return found


def of_networks(options) -> list[dict]:
    """Estimate with trained networks, for each seed."""
    changes = {
        "scenario.per_class": options.per_class,
        "epochs": options.epochs,
        "first_tasks": 1,
        "evaluators": {},
    }
    return trial.seeds_of(
        options,
        "configs/cclis_cifar10_small.py:neither",
        changes,
        "neither",
        functools.partial(of_seed, options),
    )


def of_seed(options, work, place) -> dict:
    """Estimate with one network: "choice, scope" -> mean error over draws."""
    saved = checkpoint.Checkpoints(place / "checkpoints", keep=work.loop.keep)
    state = saved.restore(job.initial_state(work)).state
    examples = work.stream.dataset.train
    rows = np.flatnonzero(np.isin(examples.label, OLD + NEW))
    label = examples.label[rows]
    config = storage.read_object(place / "config.json")
    names = "size", "resize", "mean", "std"
    view = augment_images.make_eval(**{name: config["augment"][name] for name in names})
    features = jnp.concatenate(
        [
            work.method.embed(state, view(examples.images[part]))
            for part in np.array_split(rows, 8)
        ]
    )
    z = mlp.MLP((config["method"]["hidden_dim"], 128))
    z = z.apply({"params": state.params["projector"]}, features)
    z = np.asarray(z / jnp.linalg.norm(z, axis=1, keepdims=True), np.float64)
    c = np.asarray(state.params["prototypes"], np.float64)
    c /= np.linalg.norm(c, axis=1, keepdims=True)
    return errors(z, label, c, options, np.random.default_rng(config["seed"]))


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
    main()
