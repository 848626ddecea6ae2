"""Networks applied one after another, each with its own entry in the trees."""

from collections.abc import Mapping
from typing import Any

import jax


def init(nets: Mapping, key: jax.Array, inputs: Any) -> tuple[dict, dict]:
    """Parameters and running statistics of nets of which each feeds the next.

    Args:
      nets: name -> flax module called as `(x, *, train, groups)`, in order.
      inputs: of the first net, f32[N, ...].

    Returns: params and stats, each name -> tree ({} for a net without any).
    """
    params, stats = {}, {}
    for (name, net), k_net in zip(
        nets.items(), jax.random.split(key, len(nets)), strict=True
    ):
        inputs, variables = net.init_with_output(k_net, inputs, train=True)
        params[name] = variables["params"]
        stats[name] = variables.get("batch_stats", {})
    return params, stats


def apply(
    nets: Mapping,
    params: Mapping,
    stats: Mapping,
    inputs: Any,
    *,
    train: bool,
    groups: int = 1,
) -> tuple[jax.Array, dict]:
    """Outputs of the last net, and the statistics of all nets after this pass.

    Args:
      params, stats: trees with an entry for each net; other entries are ignored.
      groups: views per example, interleaved over the rows. Each view has its own batch
        statistics.

    Returns: f32[N, D] and name -> stats.
    """
    outputs, after = inputs, {}
    for name, net in nets.items():
        variables = {"params": params[name], "batch_stats": stats[name]}
        outputs, updated = net.apply(
            variables, outputs, train=train, groups=groups, mutable=["batch_stats"]
        )
        after[name] = updated.get("batch_stats", stats[name])
    return outputs, after
