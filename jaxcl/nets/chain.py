"""Networks applied one after another, each with its own entry in the trees."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.nets import layers


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of networks; each feeds the next.

    Attributes:
      nets: name -> flax module called as `(x, *, train, groups)`, in order. The
        encoder's name is "encoder".
    """

    nets: Mapping[str, Any]

    def init(self, key: jax.Array, inputs: Any) -> tuple[dict, dict]:
        """Create parameters and running statistics of all networks.

        Args:
          key: threefry key.
          inputs: inputs of the first net, f32[N, ...].

        Returns: params and stats, each name -> tree ({} for a net without any).
        """
        params, stats = {}, {}
        keys = jax.random.split(key, len(self.nets))
        for (name, net), k_net in zip(self.nets.items(), keys, strict=True):
            inputs, variables = net.init_with_output(k_net, inputs, train=True)
            params[name] = variables.get("params", {})
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
        hidden: jax.Array | None = None,
        between: bool = False,
    ) -> tuple:
        """Apply all networks; return the last output and the new running statistics.

        Args:
          params, stats: trees with an entry for each net; other entries are ignored.
          inputs: inputs of the first net, as in `init`.
          train: whether to normalise by the batch's statistics, and move the running
            ones.
          groups: number of views per example, interleaved over the rows. Each view has
            its own batch statistics.
          key: threefry key for an encoder that drops branches; None: it drops none.
          hidden: hidden patches of a Vision Transformer, see `vit.ViT`.
          between: whether to return the statistics after each view but the last, too.

        Returns:
          f32[N, D], name -> stats, and with `between` name -> tuple of stats ({} for a
          net whose batch norm is not `layers.BatchNorm`).
        """
        outputs, after, between_stats = inputs, {}, {}
        for name, net in self.nets.items():
            extras = {"key": key, "hidden": hidden} if name == "encoder" else {}
            extras = {n: x for n, x in extras.items() if x is not None}
            outputs, new = net.apply(
                {"params": params[name], "batch_stats": stats[name]},
                outputs,
                train=train,
                groups=groups,
                mutable=["batch_stats", *([layers.BETWEEN] if between else [])],
                **extras,
            )
            after[name] = new.get("batch_stats", stats[name])
            between_stats[name] = new.get(layers.BETWEEN, {})
        return (outputs, after, between_stats) if between else (outputs, after)

    def apply_in_turn(
        self, params: Mapping, stats: Mapping, *batches: jax.Array, train: bool = True
    ) -> tuple[list[jax.Array], list[dict]]:
        """Apply the networks to several batches, each with its own batch statistics.

        On accelerators, batches of one shape go through in a single pass with their
        rows interleaved: devices keep the rows that they have. Up to rounding the
        values equal those of separate passes.

        Args:
          params, stats: trees, as in `__call__`.
          batches: inputs of each pass.
          train: flag, as in `__call__`.

        Returns: list of outputs; list of name -> stats after each batch.
        """
        count, outputs, all_stats = len(batches), [], []
        if count > 1 and len({x.shape for x in batches}) == 1 and not sharding.on_cpu():
            rows = jnp.stack(batches, axis=1).reshape(-1, *batches[0].shape[1:])
            joined, after, between_stats = self(
                params, stats, rows, train=train, groups=count, between=True
            )
            joined = joined.reshape(-1, count, *joined.shape[1:])

            def of_norm(leaf):
                return isinstance(leaf, tuple)

            outputs = [joined[:, i] for i in range(count)]
            if not train:
                return outputs, [after] * count
            # Only our own batch norm records its statistics between views.
            if jax.tree.structure(between_stats, of_norm) == jax.tree.structure(after):
                all_stats = [
                    jax.tree.map(lambda x, i=i: x[i], between_stats, is_leaf=of_norm)
                    for i in range(count - 1)
                ]
                return outputs, [*all_stats, after]
            outputs = []
        for batch in batches:
            output, stats = self(params, stats, batch, train=train)
            outputs.append(output)
            all_stats.append(stats)
        return outputs, all_stats

    def project(self, state: core.TrainState, inputs: Any) -> jax.Array:
        """Compute the output of the last network in evaluation mode, f32[N, D]."""
        return self(state.params, state.stats, inputs, train=False)[0]

    def embed(self, state: core.TrainState, inputs: Any) -> jax.Array:
        """Compute the features of the encoder alone in evaluation mode, f32[N, D]."""
        return Chain({"encoder": self.nets["encoder"]}).project(state, inputs)
