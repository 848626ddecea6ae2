"""Networks applied one after another, each with its own entry in the trees."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.nets import norm


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
        outputs, after, _ = self._pass(
            params, stats, inputs, train=train, groups=groups, key=key
        )
        return outputs, after

    def _pass(self, params, stats, inputs, *, train, groups=1, key=None, between=False):
        """Outputs; stats afterwards; and with `between` what they were between views.

        The last has nothing for a net whose batch norm is somebody else's.
        """
        outputs, updated = inputs, {}
        for name, net in self.nets.items():
            drawn = {} if key is None or name != "encoder" else {"key": key}
            outputs, updated[name] = net.apply(
                {"params": params[name], "batch_stats": stats[name]},
                outputs,
                train=train,
                groups=groups,
                mutable=["batch_stats", *([norm.BETWEEN] if between else [])],
                **drawn,
            )
        after = {
            name: new.get("batch_stats", stats[name]) for name, new in updated.items()
        }
        moved = {name: new.get(norm.BETWEEN, {}) for name, new in updated.items()}
        return outputs, after, moved

    def beside(
        self,
        *networks: tuple[Mapping, Mapping, Any],
        groups: int = 1,
        key: jax.Array | None = None,
    ) -> list[tuple[jax.Array, dict]]:
        """Pass through several networks of this form in training mode.

        Args:
          networks: params, stats and inputs of each.
          groups: as in `__call__`.
          key: for the first network's encoder, if it drops branches.

        Returns: outputs and stats of each.
        """
        first, *others = networks
        return [
            self(*first, train=True, groups=groups, key=key),
            *(self(*own, train=True, groups=groups) for own in others),
        ]

    def in_turn(
        self, params: Mapping, stats: Mapping, *batches: jax.Array
    ) -> tuple[list[jax.Array], list[dict]]:
        """Train on some batches, one after the other.

        On accelerators, batches of one shape go through in a single pass with their
        rows interleaved; each keeps its own batch statistics. Values are those of a
        pass each up to rounding.

        Args:
          params, stats: as in `__call__`.
          batches: inputs.

        Returns: outputs of each; name -> stats after each.
        """
        if _pass_at_once(batches):
            rows = _taking_turns(batches)
            outputs, along = self._at_once(params, stats, rows, len(batches))
            if along:
                return _apart(outputs, len(batches)), along
        outputs, along = [], []
        for batch in batches:
            output, stats = self(params, stats, batch, train=True)
            outputs.append(output)
            along.append(stats)
        return outputs, along

    def judge(
        self, params: Mapping, stats: Mapping, *batches: jax.Array
    ) -> list[jax.Array]:
        """Outputs of each batch in evaluation mode; one pass where `in_turn` takes one.

        Args:
          params, stats: as in `__call__`.
          batches: inputs.
        """
        if _pass_at_once(batches):
            outputs, _ = self(params, stats, _taking_turns(batches), train=False)
            return _apart(outputs, len(batches))
        return [self(params, stats, batch, train=False)[0] for batch in batches]

    def _at_once(self, params, stats, rows, count):
        """Outputs of `count` batches whose rows take turns, and stats after each.

        There are no stats where somebody else's batch norm does not tell how it moved.
        """
        outputs, after, between = self._pass(
            params, stats, rows, train=True, groups=count, between=True
        )

        def of_norm(leaf):
            return isinstance(leaf, tuple)

        if jax.tree.structure(between, of_norm) != jax.tree.structure(after):
            return outputs, []
        along = [
            jax.tree.map(lambda moved, i=i: moved[i], between, is_leaf=of_norm)
            for i in range(count - 1)
        ]
        return outputs, [*along, after]

    def project(self, state: core.TrainState, inputs: Any) -> jax.Array:
        """Outputs of the last net in evaluation mode, f32[N, D]."""
        return self(state.params, state.stats, inputs, train=False)[0]

    def embed(self, state: core.TrainState, inputs: Any) -> jax.Array:
        """Features of the encoder alone, in evaluation mode, f32[N, D]."""
        return Chain({"encoder": self.nets["encoder"]}).project(state, inputs)


def _pass_at_once(batches):
    """True on accelerators if there are several batches, all of one shape."""
    alike = all(batch.shape == batches[0].shape for batch in batches)
    return not sharding.on_cpu() and len(batches) > 1 and alike


def _taking_turns(batches):
    """Row i of each batch, then row i + 1: devices keep the rows that they have."""
    return jnp.stack(batches, axis=1).reshape(-1, *batches[0].shape[1:])


def _apart(outputs, count):
    """Undo `_taking_turns`: the rows of each of `count` batches."""
    outputs = outputs.reshape(-1, count, *outputs.shape[1:])
    return [outputs[:, i] for i in range(count)]
