"""Networks that NumPy can differentiate: linear layers, batch norm, ReLU, GELU.

`Flat` is the encoder of the tests; projectors and predictors are the library's own
`mlp.MLP`. The passes below are theirs in float64, with gradients written out.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from helpers import twins
from jaxcl.nets import layers


class Flat(nn.Module):
    """Pixels -> one linear layer -> batch norm."""

    width: int = 5
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, *, train, groups=1):
        x = nn.Dense(self.width, name="linear")(x.reshape(len(x), -1))
        return layers.BatchNorm(name="norm")(x, train=train, groups=groups)


def _linear(params, x):
    def back(slope):
        grads = {"kernel": x.T @ slope, "bias": slope.sum(axis=0)}
        return slope @ params["kernel"].T, grads

    return x @ params["kernel"] + params["bias"], back


def _batch_norm(params, running, x, train, groups):
    """Rows of group v are every `groups`-th from v on; each has moments of its own.

    The running statistics move once for each group, by a tenth, the unbiased variance.
    """
    groups, scale = groups if train else 1, params.get("scale", 1.0)
    y, scaled, spread = np.empty_like(x), np.empty_like(x), []
    for v in range(groups):
        rows = x[v::groups]
        mean, var = (
            (rows.mean(0), rows.var(0)) if train else (running["mean"], running["var"])
        )
        spread.append(np.sqrt(var + 1e-5))
        scaled[v::groups] = (rows - mean) / spread[v]
        y[v::groups] = scaled[v::groups] * scale + params.get("bias", 0.0)
        if train:
            now = {"mean": mean, "var": rows.var(0, ddof=1)}
            running = {name: 0.9 * running[name] + 0.1 * now[name] for name in now}

    def back(slope):
        grads = {"scale": (slope * scaled).sum(axis=0), "bias": slope.sum(axis=0)}
        grads = {name: grads[name] for name in params}
        down = np.empty_like(x)
        for v in range(groups):
            s, h = slope[v::groups] * scale, scaled[v::groups]
            if train:  # the moments are functions of the rows
                s = s - s.mean(axis=0) - h * (s * h).mean(axis=0)
            down[v::groups] = s / spread[v]
        return down, grads

    return y, running, back


def _relu(x):
    return np.maximum(x, 0), lambda slope: (slope * (x > 0), None)


def _gelu(x):
    """The exact one: x times the chance that a normal number is below x."""
    below = (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    return x * below, lambda slope: (slope * (below + x * density), None)


def _layers(params, stats):
    """Names of the layers in order, "" for an activation."""
    if "linear" in params:
        return ["linear", "norm"]
    last = max(int(name[6:]) for name in params if name.startswith("linear"))
    names = []
    for i in range(1, last + 1):
        names += [f"linear{i}", f"bn{i}", ""][: 3 if i < last else 2]
    return [name for name in names if name == "" or name in {*params, *stats}]


def _apply_one(params, stats, x, train, groups, activation):
    after, backs = {}, []
    for name in _layers(params, stats):
        if name == "":
            x, back = activation(x)
        elif name.startswith("linear"):
            x, back = _linear(params[name], x)
        else:  # one without factor and offset has no parameters
            moments = stats[name]
            factors = params.get(name, {})
            x, after[name], back = _batch_norm(factors, moments, x, train, groups)
        backs.append((name, back))

    def backward(slope):
        grads = {}
        for name, back in reversed(backs):
            slope, net_grads = back(slope)
            if net_grads:
                grads[name] = net_grads
        return slope, grads

    return x, after, backward


def apply(nets, params, stats, x, *, train, groups=1, smooth=()):
    """Networks one after another, as `chain.Chain`.

    Args:
      nets: names of entries of `params` and `stats`.
      smooth: which of them have a GELU for each ReLU.

    Returns:
      The output, the statistics after by net, and slope of the output -> (slope of
      `x`, gradients by net).
    """
    x, after, backs = x.reshape(len(x), -1), {}, []
    for net in nets:
        activation = _gelu if net in smooth else _relu
        x, after[net], back = _apply_one(
            params[net], stats[net], x, train, groups, activation
        )
        backs.append((net, back))

    def backward(slope):
        grads = {}
        for net, back in reversed(backs):
            slope, grads[net] = back(slope)
        return slope, grads

    return x, after, backward


# Of toy methods, where their base, strategy or regulariser has them.
OPTIONS = {
    "hidden_dim": 4,
    "output_dim": 3,
    "predictor_hidden_dim": 4,
    "distill_hidden_dim": 4,
    "temperature": 0.4,
    "distill_temperature": 0.6,
    "weight": 0.7,
    "negative_weight": 0.4,
    "invariance": 2.0,
    "variance": 1.5,
    "covariance": 0.5,
}


def apply_heads(names, params, stats, rows, *, count=None, unit=False):
    """Predictor "o" and distiller "p" behind projections, in training mode.

    Args:
      names: those that there are.
      count: rows that the distiller reads, from the first on; None: all.
      unit: whether it reads them at length 1.

    Returns:
      Outputs by letter, statistics after, and slopes by letter, with that of the
      projections as "z" -> (slope of `rows`, gradients by net).
    """
    read = (twins.unit(rows) if unit else rows)[:count]
    outputs, after, backs = {}, {}, {}
    for letter, name, inputs in (("o", "predictor", rows), ("p", "distiller", read)):
        if name in names:
            outputs[letter], more, backs[letter] = apply(
                (name,), params, stats, inputs, train=True, groups=2
            )
            after |= more

    def backward(slopes):
        down, grads = slopes["z"].copy(), {}
        for letter, back in backs.items():
            more, head_grads = back(slopes[letter])
            if letter == "p" and unit:
                length = np.linalg.norm(rows[:count], axis=1, keepdims=True)
                along = np.sum(more * read, axis=1, keepdims=True) * read
                more = (more - along) / length
            down[: len(more)] += more
            grads |= head_grads
        return down, grads

    return outputs, after, backward
