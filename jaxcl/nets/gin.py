"""Graph isomorphism network over padded batches of graphs.

Xu et al., "How Powerful are Graph Neural Networks?", ICLR 2019, with the order of
layers and the readout of the encoder of InfoGraph (Sun et al., ICLR 2020) and GraphCL
(You et al., NeurIPS 2020). Padding and masked nodes and edges contribute exactly zero,
so no result depends on the amount of padding.

Departure: the released code of GraphCL adds an edge to itself to every node of a graph
but its last, so that most nodes count twice. `eps=1` counts all of them twice.
"""

from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcl import schema
from jaxcl.data.stream import graph_arrays
from jaxcl.nets import gcn


class GINConv(nn.Module):
    """The convolution W2 relu(W1 s + b1) + b2, s = (1 + eps) x + the neighbours' sum.

    W1 and W2 start as Glorot's uniform, b1 and b2 as zero.

    Attributes:
      features: width of both Linears.
      eps: additional weight of a node itself over its neighbours'; it is not learnt.
    """

    features: int
    eps: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, graphs: graph_arrays.Graphs) -> jax.Array:
        """Convolve node features f[n,F] -> f[n,features]."""
        x = (1.0 + self.eps) * x + gcn.neighbour_sum(x, graphs)
        start = nn.initializers.glorot_uniform()
        x = nn.relu(nn.Dense(self.features, kernel_init=start, name="linear1")(x))
        return nn.Dense(self.features, kernel_init=start, name="linear2")(x)


class GIN(gcn.GraphEncoder):
    """Layers of GINConv, ReLU and then batch norm with a factor and an offset.

    Nothing is random: the key is not used.

    Attributes:
      eps: weight, see `GINConv`.
    """

    layers: int = 3
    eps: float = 0.0

    def apply_layer(self, x, graphs, layer, *, train, key):
        """Apply layer number `layer`, see `gcn.GraphEncoder`."""
        x = nn.relu(GINConv(self.width, self.eps, name=f"conv{layer}")(x, graphs))
        bn = gcn.MaskedBatchNorm(self.momentum, affine=True, name=f"bn{layer}")
        return bn(x, graphs.node_mask, train=train)


@schema.checked("config.encoder")
def gin(
    *,
    width: schema.Width = 32,
    layers: Annotated[int, schema.Range(1, 1000)] = 3,
    eps: Annotated[float, schema.Range(above=-1)] = 0.0,  # 1 + eps weighs a node itself
    momentum: schema.Share = 0.9,
    dtype: Any = jnp.float32,
) -> GIN:
    """Build the graph encoder `GIN`, as in the papers.

    Raises:
      Refused: an option is out of its range; `dtype` is not float32, which sums over
        many nodes need.
    """
    gcn.check_dtype(dtype)
    return GIN(width, layers, momentum, eps)
