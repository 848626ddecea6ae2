"""What evaluators judge: a linear map of images of 4 x 4 pixels, and their twins."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, sharding
from jaxcl.data import stream
from jaxcl.data.images import readers
from jaxcl.data.stream import scenarios
from jaxcl.evals import head as head_lib
from jaxcl.evals import linear
from jaxcl.nets import linear_head

CLASSES, SIZE, DIM = 6, 4, 5
MEAN, STD = (0.4, 0.5, 0.6), (0.25, 0.2, 0.3)


class State(core.NamedTuple):
    params: dict


def state_of(seed):
    shape = (SIZE * SIZE * 3, DIM)
    weight = np.random.default_rng(seed).normal(size=shape) / 4
    return State({"w": jnp.asarray(weight, jnp.float32)})


def embed(state, images):
    return images.reshape(len(images), -1) @ state.params["w"]


def split_of(seed, count, noise=60):
    """Images whose class is a pattern under noise."""
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.arange(count) % CLASSES).astype(np.int32)
    pattern = np.random.default_rng(99).uniform(40, 215, (CLASSES, SIZE, SIZE, 3))
    images = pattern[label] + rng.normal(0, noise, (count, SIZE, SIZE, 3))
    images = np.clip(images, 0, 255).astype(np.uint8)
    domain = rng.integers(0, 3, count).astype(np.int32)
    return stream.Examples(label, domain, images)


def streamed(examples, read=None):
    """The same images, read row by row."""
    read = read or examples.images.__getitem__
    reader = readers.FunctionRows(read, len(examples.label), "toy")
    return examples._replace(images=None, reader=reader)


@functools.cache
def dataset(noise=60, streams=False):
    names = tuple("abcdef")
    splits = [split_of(0, 50, noise), split_of(1, 31, noise)]
    if streams:
        splits = [streamed(x) for x in splits]
    return stream.Dataset("toy", names, tuple("xyz"), splits[0], None, splits[1])


def parts_of(scenario="class", data=None, devices=1, tasks=3, **more):
    data = dataset() if data is None else data
    count = None if scenario in ("joint", "domain") else tasks
    cut = scenarios.make(data, name=scenario, num_tasks=count)
    fields = dict(
        embed=embed,
        stream=cut,
        num_classes=CLASSES,
        size=SIZE,
        mean=MEAN,
        std=STD,
        resize=None,
        seed=3,
        mesh=sharding.mesh(devices),
        workers=0,
    )
    return core.EvalParts(**fields | more)


def embedded(state, images):
    """Float64 twin of `embed` on normalised images."""
    pixels = (np.asarray(images, np.float64) / 255 - MEAN) / np.asarray(STD)
    return pixels.reshape(len(images), -1) @ np.asarray(state.params["w"], np.float64)


def device_orders(n, batch, count, k_epochs):
    """Epoch -> the `count` of n rows that a set in memory takes, in order."""

    def order_of(epoch):
        k_order, _ = jax.random.split(jax.random.fold_in(k_epochs, epoch))
        rows = jnp.pad(jnp.arange(count), (0, max(n, batch) - count))
        order = np.asarray(head_lib.epoch_order(k_order, rows, count)[:count])
        assert sorted(order) == list(range(count))
        return order

    return order_of


def momentum_twin():
    """PyTorch's SGD with momentum 0.9: the move of a leaf, at its place in the head."""
    velocity = [0.0, 0.0]

    def move(i, slope):
        velocity[i] = 0.9 * velocity[i] + slope
        return velocity[i]

    return move


def adam_twin():
    """PyTorch's Adam, from its documentation, as `momentum_twin`."""
    m, v, steps = [0.0, 0.0], [0.0, 0.0], [0, 0]

    def move(i, slope):
        steps[i] += 1
        m[i] = 0.9 * m[i] + 0.1 * slope
        v[i] = 0.999 * v[i] + 0.001 * slope**2
        first, second = m[i] / (1 - 0.9 ** steps[i]), v[i] / (1 - 0.999 ** steps[i])
        return first / (np.sqrt(second) + 1e-8)

    return move


def probe_twin(x, y, head, order_of, batch, lr=0.3, optimizer=momentum_twin):
    """A linear layer that is trained from the equations, with OPTIONS."""
    w, b = (np.asarray(leaf, np.float64) for leaf in head)
    move = optimizer()
    for epoch in range(7):
        order, losses = order_of(epoch), []
        rate = lr * 0.1 ** sum(m <= epoch for m in (3, 5))
        for step in range(max(len(order) // batch, 1)):
            at = order[step * batch : (step + 1) * batch]
            scores = x[at] @ w + b
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            losses.append(-np.log(p[np.arange(len(at)), y[at]]).mean())
            gap = (p - np.eye(CLASSES)[y[at]]) / len(at)
            w = w - rate * move(0, x[at].T @ gap + 0.01 * w)
            b = b - rate * move(1, gap.sum(0) + 0.01 * b)
    return w, b, np.mean(losses)


def fitted(x, y, task, batch, *, domain=0, streams=False, twin=probe_twin):
    """Fit a probe of seed 3 after a task to rows of a set of 50, by `twin`."""
    k_start, k_epochs = head_lib.probe_keys(3, task, domain)
    order_of = device_orders(50, batch, len(x), k_epochs)
    if streams:

        def order_of(epoch):
            rng = np.random.default_rng([3, task, epoch])
            return stream.epoch_order(rng, np.arange(len(x)), batch).reshape(-1)

    return twin(x, y, linear_head.start_head(k_start, DIM, CLASSES), order_of, batch)


def accuracies(parts, guess):
    label = parts.stream.evaluation.label
    return [(guess[t.test] == label[t.test]).mean() for t in parts.stream.tasks]


def probe(parts, **settings):
    """A linear probe with these settings, whether an option sets them or a preset."""
    return linear.make_evaluator(parts, head_lib.ProbeSettings(**settings))


OPTIONS = dict(epochs=7, batch_size=16, lr=0.3, weight_decay=0.01, milestones=(3, 5))


def options_of(reading, **more):
    """Crops are the whole image, always flipped: nothing is left to chance."""
    crops = dict(augment=reading != "features", scale=(1.0, 1.0), flip=1.0)
    return OPTIONS | crops | more


def check_probe(result, parts, state, at, batch, *, reading, task=1, twin=probe_twin):
    """The probe is what `twin` makes of rows `at` of the train split; return scores."""
    data = dataset()
    images = data.train.images[at]
    x = embedded(state, images if reading == "features" else images[:, :, ::-1])
    how = {"streams": reading == "streamed", "twin": twin}
    w, b, loss = fitted(x, data.train.label[at], task, batch, **how)
    np.testing.assert_allclose(result.scalars["train_loss"], loss, rtol=1e-4)
    scores = embedded(state, data.test.images) @ w + b
    want = accuracies(parts, scores.argmax(1))
    np.testing.assert_allclose(result.rows["class_incremental"], want)
    return scores


def share_twin(label, domain, fraction, seed):
    """Rows of a semi-supervised probe, class by class."""
    rows = []
    for c in sorted(set(label)):
        for d in sorted(set(domain)):
            rows_of = [i for i in range(len(label)) if (label[i], domain[i]) == (c, d)]
            order = np.random.default_rng([seed, c, d]).permutation(rows_of)
            rows += (
                order[: max(1, round(fraction * len(rows_of)))].tolist()
                if rows_of
                else []
            )
    return sorted(rows)


def entropy(counts):
    shares = [n / sum(counts) for n in counts if n]
    return -sum(p * math.log(p) for p in shares)


def spread_twins(x, label):
    """Eqs. 8 and 9 of each class, in float64: {c: (variance, similarity)}."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    classes = [c for c in range(CLASSES) if (label == c).any()]
    means = {c: x[label == c].mean(axis=0) for c in classes}
    means = {c: m / np.linalg.norm(m) for c, m in means.items()}
    pairs = {}
    for c in classes:
        variance = np.mean([(means[c] @ row - 1) ** 2 for row in x[label == c]])
        others = [means[c] @ means[d] for d in classes if d != c]
        pairs[c] = variance, np.mean(others)
    return pairs
