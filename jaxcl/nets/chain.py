"""Networks applied one after another, each with its own entry in the trees."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxcl import core


@dataclasses.dataclass(frozen=True)
class Chain:
    """Networks of which each feeds the next.

    Attributes:
      nets: name -> flax module called as `(x, *, train, groups)`, in order. That of the
        encoder is "encoder".
    """

    nets: Mapping[str, Any]

    def init(self, key: jax.Array, inputs: Any) -> tuple[dict, dict]:
        """Parameters and running statistics.

        Args:
          key: threefry key.
          inputs: of the first net, f32[N, ...].

        Returns: params and stats, each name -> tree ({} for a net without any).
        """
        params, stats = {}, {}
        keys = jax.random.split(key, len(self.nets))
        for (name, net), k_net in zip(self.nets.items(), keys, strict=True):
            inputs, variables = net.init_with_output(k_net, inputs, train=True)
            params[name] = variables["params"]
            stats[name] = variables.get("batch_stats", {})
        return params, stats

    def __call__(
        self,
        params: Mapping,
        stats: Mapping,
        inputs: Any,
        *,
        train: bool,
        groups: int = 1,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, dict]:
        """Outputs of the last net, and the statistics of all nets after this pass.

        Args:
          params, stats: trees with an entry for each net; other entries are ignored.
          inputs: as in `init`.
          train: with the statistics of the batch, which move the running ones.
          groups: views per example, interleaved over the rows. Each view has its own
            batch statistics.
          key: for an encoder that drops branches; without one it drops none.

        Returns: f32[N, D] and name -> stats.
        """
        outputs, after = inputs, {}
        for name, net in self.nets.items():
            variables = {"params": params[name], "batch_stats": stats[name]}
            drawn = {} if key is None or name != "encoder" else {"key": key}
            outputs, updated = net.apply(
                variables,
                outputs,
                train=train,
                groups=groups,
                mutable=["batch_stats"],
                **drawn,
            )
            after[name] = updated.get("batch_stats", stats[name])
        return outputs, after

    def project(self, state: core.TrainState, inputs: Any) -> jax.Array:
        """Outputs of the last net in evaluation mode, f32[N, D]."""
        return self(state.params, state.stats, inputs, train=False)[0]

    def embed(self, state: core.TrainState, inputs: Any) -> jax.Array:
        """Features of the encoder alone, in evaluation mode, f32[N, D]."""
        return Chain({"encoder": self.nets["encoder"]}).project(state, inputs)
