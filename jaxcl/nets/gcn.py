"""Graph convolutional network over padded batches of graphs.

Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks",
ICLR 2017, with the layers and the readout of the ICL paper's encoder. Padding and
masked nodes and edges contribute exactly zero, so no result depends on the amount of
padding.
"""

from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxcl import schema
from jaxcl.data.stream import graph_arrays
from jaxcl.errors import Refused


def propagate(x: jax.Array, graphs: graph_arrays.Graphs) -> jax.Array:
    """Average over neighbours: D^-1/2 (A + I) D^-1/2 x, unmasked edges only, f[n,C].

    D is the diagonal matrix of the row sums of A + I. A masked node keeps its own x.
    """
    nodes = len(graphs.node_graph)
    live = graphs.edge_mask.astype(x.dtype)
    scale = lax.rsqrt(1.0 + _sum_received(live, graphs, nodes))[:, None]
    scaled = scale * x
    return scale * (scaled + neighbour_sum(scaled, graphs))


def neighbour_sum(x: jax.Array, graphs: graph_arrays.Graphs) -> jax.Array:
    """Sum the rows of each node's neighbours over unmasked edges, A x, f[n,C]."""
    messages = jnp.where(graphs.edge_mask[:, None], x[graphs.senders], 0.0)
    return _sum_received(messages, graphs, len(graphs.node_graph))


def _sum_received(messages, graphs, nodes):
    """Sum the rows that edges send to each node."""
    return jax.ops.segment_sum(
        messages, graphs.receivers, num_segments=nodes, indices_are_sorted=True
    )


def readout(x: jax.Array, graphs: graph_arrays.Graphs) -> jax.Array:
    """Sum the unmasked nodes of each graph, f[B,C]."""
    return jax.ops.segment_sum(
        jnp.where(graphs.node_mask[:, None], x, 0.0),
        graphs.node_graph,
        num_segments=len(graphs.graph_mask),
        indices_are_sorted=True,
    )


def dropout(
    key: jax.Array, x: jax.Array, graphs: graph_arrays.Graphs, *, rate: float = 0.5
) -> jax.Array:
    """Zero entries of f[n,C] with probability `rate`, scale the rest by 1/(1 - rate).

    Every node has its own key (`graph_arrays.node_keys`), so padding does not change
    draws.
    """
    keys = graph_arrays.node_keys(key, graphs)
    mask = jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(mask, x / (1.0 - rate), 0.0)


class GCNConv(nn.Module):
    """The graph convolution D^-1/2 (A + I) D^-1/2 x W + b (Kipf and Welling).

    Attributes:
      features: width of the output.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, graphs: graph_arrays.Graphs) -> jax.Array:
        """Convolve node features f[n,F] -> f[n,features]."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.glorot_uniform(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        # Both orders give the same result; the narrower rows go over the edges.
        if shape[0] < shape[1]:
            return propagate(x, graphs) @ kernel + bias
        return propagate(x @ kernel, graphs) + bias


class MaskedBatchNorm(nn.Module):
    """Batch normalisation over the unmasked rows, as PyTorch's over these rows alone.

    Rows are normalised with the biased variance; the running statistics keep the
    unbiased one, and do not move if fewer than two rows are unmasked.

    Attributes:
      momentum: weight of the OLD running value (PyTorch's momentum is 1 - this).
      epsilon: number added to the variance.
      affine: whether to learn a factor and an offset per channel.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    affine: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, *, train: bool) -> jax.Array:
        """Normalise f[n,C] by the rows in bool[n]; `train` as in `layers.BatchNorm`."""
        width = x.shape[-1:]
        mean = self.variable("batch_stats", "mean", jnp.zeros, width)
        var = self.variable("batch_stats", "var", jnp.ones, width)
        center, spread = mean.value, var.value
        if train:
            rows = mask[:, None]
            count = jnp.sum(mask).astype(x.dtype)
            center = jnp.sum(jnp.where(rows, x, 0.0), 0) / jnp.maximum(count, 1.0)
            squares = jnp.sum(jnp.where(rows, jnp.square(x - center), 0.0), 0)
            spread = squares / jnp.maximum(count, 1.0)
            if not self.is_initializing():
                unbiased = squares / jnp.maximum(count - 1.0, 1.0)
                for running, new in ((mean, center), (var, unbiased)):
                    ema = self.momentum * running.value + (1.0 - self.momentum) * new
                    running.value = jnp.where(count > 1, ema, running.value)
        y = (x - center) * lax.rsqrt(spread + self.epsilon)
        if self.affine:
            y *= self.param("scale", nn.initializers.ones, width)
            y += self.param("bias", nn.initializers.zeros, width)
        return y


class GraphEncoder(nn.Module):
    """Layers over the nodes of graphs, and the readouts of all layers side by side.

    Each kind of encoder adds `apply_layer`, which maps node features f[n,F] to
    f[n,width]; its arguments are the features, the graphs, the number of the layer from
    1 on, and `train` and `key` as in `__call__`.

    Attributes:
      width: width of each layer.
      layers: number of layers.
      momentum: weight of the OLD running value in batch norm.
    """

    width: int = 32
    layers: int = 2
    momentum: float = 0.9

    @property
    def dtype(self):
        """The type of the arithmetic: float32 alone."""
        return jnp.float32

    @property
    def num_features(self) -> int:
        """The length of a graph's embedding."""
        return self.width * self.layers

    @nn.compact
    def __call__(
        self,
        graphs: graph_arrays.Graphs,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Embed a batch of graphs as f32[B, layers * width]; empty slots are zero.

        Args:
          graphs: the batch; features of masked nodes are ignored.
          train: whether to apply dropout, if there is any, and to use and move batch
            statistics (collection "batch_stats" must be mutable).
          key: threefry key of the dropout; an encoder with dropout needs it in
            training.

        Raises:
          Refused: the key is missing.
        """
        # Zeros, since a masked number that is not finite would reach W's gradient.
        x, outputs = jnp.where(graphs.node_mask[:, None], graphs.features, 0.0), []
        for layer in range(1, self.layers + 1):
            x = self.apply_layer(x, graphs, layer, train=train, key=key)
            outputs.append(readout(x, graphs))
        return jnp.concatenate(outputs, axis=-1)


class GCN(GraphEncoder):
    """Layers of GCNConv, batch norm, LeakyReLU(0.01) and dropout.

    ICL, section 5.1; its released code has two layers of 32.

    Attributes:
      dropout: rate after each layer, in training.
      affine: whether batch norm learns a factor and an offset.
    """

    dropout: float = 0.5
    affine: bool = False

    def apply_layer(self, x, graphs, layer, *, train, key):
        """Apply layer number `layer`, see `GraphEncoder`."""
        drops = train and self.dropout > 0
        if drops and key is None:
            raise Refused(f"key=None: dropout={self.dropout} in training needs a key")
        x = GCNConv(self.width, name=f"conv{layer}")(x, graphs)
        bn = MaskedBatchNorm(self.momentum, affine=self.affine, name=f"bn{layer}")
        x = nn.leaky_relu(bn(x, graphs.node_mask, train=train), 0.01)
        if drops:
            layer_key = jax.random.fold_in(key, layer)
            x = dropout(layer_key, x, graphs, rate=self.dropout)
        return x


@schema.checked("config.encoder")
def gcn(
    *,
    width: schema.Width = 32,
    layers: Annotated[int, schema.Range(1, 1000)] = 2,
    dropout: schema.Fraction = 0.5,
    affine: bool = False,
    momentum: schema.Share = 0.9,
    dtype: Any = jnp.float32,
) -> GCN:
    """Build the graph encoder `GCN`.

    Raises:
      Refused: an option is out of its range; `dtype` is not float32, which sums over
        many nodes need.
    """
    check_dtype(dtype)
    return GCN(width, layers, momentum, dropout, affine)


def check_dtype(dtype: Any) -> None:
    """Refuse any type but float32, which sums over many nodes need.

    Raises:
      Refused: `dtype` is another type.
    """
    if dtype != jnp.float32:
        raise Refused("config.precision: graphs are computed in 'float32'")
