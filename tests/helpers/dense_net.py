"""Networks that NumPy can differentiate: linear layers, batch norm, ReLU.

`Flat` is the encoder of the tests; projectors and predictors are the library's own
`mlp.MLP`. The passes below are theirs in float64, with gradients written out.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxcl.nets import norm


class Flat(nn.Module):
    """Pixels -> one linear layer -> batch norm."""

    width: int = 5
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, *, train, groups=1):
        x = nn.Dense(self.width, name="linear")(x.reshape(len(x), -1))
        return norm.BatchNorm(name="norm")(x, train=train, groups=groups)


def _linear(params, x):
    def back(slope):
        grads = {"kernel": x.T @ slope, "bias": slope.sum(axis=0)}
        return slope @ params["kernel"].T, grads

    return x @ params["kernel"] + params["bias"], back


def _batch_norm(params, kept, x, train, groups):
    """Rows of group v are every `groups`-th from v on; each has moments of its own.

    The running statistics move once for each group, by a tenth, the unbiased variance.
    """
    groups = groups if train else 1
    y, scaled, spread = np.empty_like(x), np.empty_like(x), []
    for v in range(groups):
        rows = x[v::groups]
        mean, var = (
            (rows.mean(0), rows.var(0)) if train else (kept["mean"], kept["var"])
        )
        spread.append(np.sqrt(var + 1e-5))
        scaled[v::groups] = (rows - mean) / spread[v]
        y[v::groups] = scaled[v::groups] * params["scale"] + params["bias"]
        if train:
            now = {"mean": mean, "var": rows.var(0, ddof=1)}
            kept = {name: 0.9 * kept[name] + 0.1 * now[name] for name in now}

    def back(slope):
        grads = {"scale": (slope * scaled).sum(axis=0), "bias": slope.sum(axis=0)}
        down = np.empty_like(x)
        for v in range(groups):
            s, h = slope[v::groups] * params["scale"], scaled[v::groups]
            if train:  # the moments are functions of the rows
                s = s - s.mean(axis=0) - h * (s * h).mean(axis=0)
            down[v::groups] = s / spread[v]
        return down, grads

    return y, kept, back


def _relu(x):
    return np.maximum(x, 0), lambda slope: (slope * (x > 0), None)


def _layers(params):
    """Names of the layers in order, "" for a ReLU."""
    if "linear" in params:
        return ["linear", "norm"]
    last = max(int(name[6:]) for name in params if name.startswith("linear"))
    names = []
    for i in range(1, last + 1):
        names += [f"linear{i}", f"bn{i}", ""] if i < last else [f"linear{i}"]
    return [name for name in names if name == "" or name in params]


def _apply_one(params, stats, x, train, groups):
    after, backs = {}, []
    for name in _layers(params):
        if name == "":
            x, back = _relu(x)
        elif "kernel" in params[name]:
            x, back = _linear(params[name], x)
        else:
            own = params[name], stats[name]
            x, after[name], back = _batch_norm(*own, x, train, groups)
        backs.append((name, back))

    def backward(slope):
        grads = {}
        for name, back in reversed(backs):
            slope, own = back(slope)
            if own is not None:
                grads[name] = own
        return slope, grads

    return x, after, backward


def apply(nets, params, stats, x, *, train, groups=1):
    """Networks one after another, as `chain.Chain`.

    Args:
      nets: names of entries of `params` and `stats`.

    Returns:
      The output, the statistics after by net, and slope of the output -> (slope of
      `x`, gradients by net).
    """
    x, after, backs = x.reshape(len(x), -1), {}, []
    for net in nets:
        x, after[net], back = _apply_one(params[net], stats[net], x, train, groups)
        backs.append((net, back))

    def backward(slope):
        grads = {}
        for net, back in reversed(backs):
            slope, grads[net] = back(slope)
        return slope, grads

    return x, after, backward
