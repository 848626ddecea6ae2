"""Pass a batch through an encoder in pieces: less memory for a third more time.

Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", RepL4NLP 2021 (GradCache). A forward pass keeps the features alone. The
backward pass computes the activations of one piece after another again, from the
gradient in the features of all rows. So every loss, contrastive ones included, has the
gradient of the whole batch.

Departure: projectors and heads take the whole batch at once, since they are small.

The pieces are iterations of a loop, in which gradients of convolutions are slow on a
CPU. XLA's CPU backend would undo pieces that are written one after another.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcl.errors import Refused


@dataclasses.dataclass(frozen=True)
class PiecewiseEncoder:
    """An encoder that trains on `count` pieces of a batch, one after another.

    A batch norm normalises each piece by itself and moves its running statistics once
    for each. Networks without batch norm give the same result as for the whole batch.

    Attributes:
      net: flax module, or an encoder like `tuning.TunedEncoder`.
      count: number of pieces of a batch.
    """

    net: Any
    count: int

    def __getattr__(self, name: str) -> Any:
        """Take every other attribute from the encoder."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.net, name)

    def apply(
        self,
        variables: dict,
        inputs: jax.Array,
        *,
        train: bool = False,
        groups: int = 1,
        mutable: Any = False,
        **drawn: jax.Array,
    ) -> Any:
        """Apply the encoder, in training piece by piece.

        Raises:
          Refused: the rows of a batch do not divide into equal pieces.
        """
        flags = {"train": train, "groups": groups}
        if not train:
            return self.net.apply(variables, inputs, mutable=mutable, **flags, **drawn)
        rows, rest = divmod(inputs.shape[0], self.count * groups)
        if rest:
            raise Refused(
                f"config.accumulate={self.count}: must divide the "
                f"{inputs.shape[0] // groups} rows that the method passes through its "
                "encoder together"
            )

        def apply_piece(params, stats, images, number):
            keys = {name: jax.random.fold_in(k, number) for name, k in drawn.items()}
            trees = {"params": params, "batch_stats": stats}
            images = images.reshape(-1, *images.shape[2:])
            features, updates = self.net.apply(
                trees, images, mutable=["batch_stats"], **flags, **keys
            )
            features = features.reshape(rows, groups, *features.shape[1:])
            return updates.get("batch_stats", stats), features

        # Take every count-th example, so that each device has its share of a piece.
        images = inputs.reshape(rows, self.count, groups, *inputs.shape[1:])
        params, stats = variables["params"], variables.get("batch_stats", {})
        # A loop keeps both passes apart.
        apply_piece = jax.checkpoint(apply_piece, prevent_cse=False)
        stats, features = lax.scan(
            lambda stats, piece: apply_piece(params, stats, *piece),
            stats,
            (jnp.moveaxis(images, 1, 0), jnp.arange(self.count)),
        )
        features = jnp.moveaxis(features, 0, 1)  # [rows, count, groups, D]
        outputs = features.reshape(inputs.shape[0], *features.shape[3:])
        return outputs, {"batch_stats": stats}
