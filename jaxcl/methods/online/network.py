"""The network of online methods: an encoder, and one head over all classes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import replay as losses
from jaxcl.nets import chain, layers, traits

Head = Literal["linear", "cosine"]


class Rows(NamedTuple):
    """Incoming or replayed examples, as the network takes them."""

    images: jax.Array  # f32[R,H,W,C]
    label: jax.Array  # i32[R]
    mask: jax.Array  # bool[R], False: the row does not exist, it fills the shape
    raw: jax.Array  # u8[R,H,W,C], not augmented
    items: dict = {}  # the memory's items of these rows
    slots: jax.Array | None = None  # i32[R], slots in the memory; capacity: in none
    labelled: "Rows | None" = None  # incoming rows only: the batch's labelled part


class Outputs(NamedTuple):
    """Outputs of the network for rows."""

    features: jax.Array  # f32[R,D]
    logits: jax.Array  # f32[R,C]


@dataclasses.dataclass(frozen=True)
class Network:
    """An encoder and one head over all classes."""

    encoder: Any
    head: Head  # "linear", with a bias, or "cosine", see losses.replay.cosine_logits
    num_classes: int

    def init(self, key: jax.Array, images: jax.Array):
        """Return parameters and running statistics.

        The head starts by the encoder's `start`, else like PyTorch's.
        """
        k_encoder, k_weight, k_bias = jax.random.split(key, 3)
        params, stats = self._chain.init(k_encoder, images)
        features = jax.eval_shape(
            lambda: self._chain(params, stats, images, train=False)[0]
        )
        shape = self.num_classes, features.shape[1]
        start = traits.read_traits(self.encoder).start
        weight, bias = layers.linear_initializers(
            start, fan_in=shape[1], fan_out=shape[0]
        )
        head = {"weight": weight(k_weight, shape)}
        if self.head == "linear":
            head["bias"] = bias(k_bias, shape[:1])
        return params | {"head": head}, stats

    @property
    def _chain(self):
        return chain.Chain({"encoder": self.encoder})

    def embed(self, state: core.TrainState, images: jax.Array) -> jax.Array:
        """Return features of the encoder, in evaluation mode, f32[N,D]."""
        return self._chain.embed(state, images)

    def logits(self, params: core.PyTree, features: jax.Array) -> jax.Array:
        """Map features f32[R,D] to logits f32[R,C]."""
        head = params["head"]
        if self.head == "cosine":
            return losses.cosine_logits(features, head["weight"])
        return features @ head["weight"].T + head["bias"]

    def __call__(
        self,
        params: core.PyTree,
        stats: core.PyTree,
        images: jax.Array,
        *,
        train: bool,
    ):
        """Return outputs, and the statistics after this pass."""
        features, stats = self._chain(params, stats, images, train=train)
        return Outputs(features, self.logits(params, features)), stats

    def pass_together(
        self, params: core.PyTree, stats: core.PyTree, incoming: Rows, *draws: Rows
    ):
        """Pass incoming and replayed rows, each normalised by its own batch.

        The running statistics move by incoming rows first, and by a draw only if it has
        rows that exist. If a draw has no rows, no later draw has any.
        """
        batches = [rows.images for rows in (incoming, *draws)]
        features, (stats, *later) = self._chain.apply_in_turn(params, stats, *batches)
        new, *old = (Outputs(x, self.logits(params, x)) for x in features)
        for rows, after in zip(draws, later, strict=True):
            stats = _if_any(rows, after, stats)
        return (new, *old), stats

    def compute_logits(
        self, params: core.PyTree, stats: core.PyTree, *row_groups: Rows, train: bool
    ) -> list[jax.Array]:
        """Return logits of some rows, f32[R,C] for each group; no statistics move.

        `train=True` normalises each group by its own batch, False by the running ones.
        """
        images = [rows.images for rows in row_groups]
        features, _ = self._chain.apply_in_turn(params, stats, *images, train=train)
        return [self.logits(params, x) for x in features]

    def pass_replayed(self, params: core.PyTree, stats: core.PyTree, rows: Rows):
        """Pass replayed rows; if none exists the statistics do not change."""
        outputs, after = self(params, stats, rows.images, train=True)
        return outputs, _if_any(rows, after, stats)

    def gradient(self, state: core.TrainState, loss: Callable):
        """Differentiate a loss that is computed by passes of this network.

        Args:
          state: state at which the gradient is taken.
          loss: params -> (f32[], anything).

        Returns:
          (value, anything), the gradient of `state.params`, and metrics, here none.
        """
        return *jax.value_and_grad(loss, has_aux=True)(state.params), {}


def _if_any(rows, after, before):
    """Return the statistics after a pass; before it if none of its rows exists."""
    any_rows = jnp.any(rows.mask)
    return jax.tree.map(lambda new, old: jnp.where(any_rows, new, old), after, before)
