"""GSS: the memory keeps rows whose gradients differ, greedy variant.

Aljundi et al., "Gradient based Sample Selection for Online Continual Learning",
NeurIPS 2019 (GSS-Greedy).

Departures:
- The step is that of experience replay with one mean over incoming rows and one over
  rows of the whole memory; the released code steps on the two in turn, ten times a
  batch (config.replay.updates repeats this step).
- `form="paper"` is algorithm 2, row by row, against gradients of single rows; all rows
  of a batch are scored against the memory before it. `form="code"` scores against
  gradients of whole draws and compares the score of the batch first.
- Rows that arrive while the memory is empty have the code's score in both forms.
- `gradients="head"` takes gradients in the head's parameters alone.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import flatten_util

from jaxcl import core, schema, sharding
from jaxcl.losses import replay as losses
from jaxcl.memory import buffer, diversity
from jaxcl.methods import online


def _fill_options(options: dict, replay: core.Replay | None) -> dict:
    """Fill in the form's rows of a gradient if the option is None."""
    rows = options["rows"]
    if rows is None and options["form"] == "paper":
        rows = 1
    if rows is None and replay is not None:
        rows = replay.size
    return {"rows": rows}


@schema.checked("config.method", fill=_fill_options)
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    form: online.Form = "paper",
    gradients: Literal["all", "head"] = "all",
    vectors: schema.Count = 10,
    rows: schema.Count | None = None,
) -> core.Method:
    """Replay from a memory that keeps rows with different gradients.

    Gradients are of the cross-entropy over all classes, in evaluation mode, after the
    update, of images without augmentation. A batch of B rows costs `vectors` passes
    of `rows` rows and B passes of one row, forward and backward, and one pass of B rows
    under "code", besides the two passes of experience replay.

    Args:
      head: "linear" or "cosine".
      form: "paper" or "code", see `diversity.choose_in_turn` and
        `diversity.choose_at_once`.
      gradients: gradients with respect to "all" parameters or to those of the "head";
        the latter costs two forward passes and none backward.
      vectors: gradients of disjoint stored rows to compare with; fewer while the memory
        holds fewer rows.
      rows: stored rows of a gradient; None: 1 under "paper", config.replay.size under
        "code".

    Raises:
      Refused: naming field, value and range.
    """
    net = online.build_network(parts, head)

    def update(state, incoming, key):
        replayed = online.draw_rows(parts, state.extra.memory, key)

        def loss(params):
            return online.cross_entropy(net, params, state.stats, incoming, replayed)

        return *online.descend(parts, net, state, loss), {}

    def choose_slots(state, key, batch):
        """Return scores f32[B] of incoming rows, and their slots i32[B]."""
        k_draw, k_choose = jax.random.split(key)
        memory = state.extra.memory
        gradients_of = functools.partial(group_gradients, parts, net, state, gradients)
        size = min(rows, memory.capacity)
        count = min(vectors, memory.capacity // size)
        references = _references(parts, gradients_of, memory, k_draw, count, size)
        images, label = parts.eval_transform(batch["image"]), batch["label"]
        ones = jnp.ones(label.shape, bool)

        row_gradients = gradients_of(images[:, None], label[:, None], ones[:, None])
        scores = diversity.similarity_score(row_gradients, *references)
        stored = memory.items["score"], memory.filled
        if form == "paper":
            return scores, diversity.choose_in_turn(k_choose, *stored, scores)
        batch_gradient = gradients_of(images[None], label[None], ones[None])
        batch_score = diversity.similarity_score(batch_gradient, *references)[0]
        return scores, diversity.choose_at_once(k_choose, *stored, scores, batch_score)

    def write_batch(state, key, batch, _):
        scores, slots = choose_slots(state, key, batch)
        items = online.stored_rows(state, batch, score=scores)
        read = scores, state.params
        memory = buffer.write(state.extra.memory, slots, items, after=read)
        return state.replace(extra=state.extra._replace(memory=memory))

    return online.make_method(
        parts,
        net,
        update,
        write=write_batch,
        seen_only=False,
        items=lambda logits: {"score": jnp.zeros((), jnp.float32)},
    )


def _references(parts, gradients_of, memory, key, count, size):
    """Return gradients of `count` disjoint draws of `size` rows, and which count."""
    drawn = online.draw_rows(parts, memory, key, size=count * size, augment=False)

    def cut_draw(x):
        return x.reshape(count, size, *x.shape[1:])

    images, label, mask = map(cut_draw, (drawn.images, drawn.label, drawn.mask))
    return gradients_of(images, label, mask), complete(mask)


def complete(mask: jax.Array) -> jax.Array:
    """Mark the complete groups, and the first one even if it is not, bool[N].

    Args:
      mask: bool[N,R], rows that exist, before those that do not.
    """
    first = jnp.arange(len(mask)) == 0
    return mask.all(axis=1) | (mask.any(axis=1) & first)


def group_gradients(
    parts: core.Parts,
    net: online.Network,
    state: core.TrainState,
    gradients: str,
    images: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Return gradients of the mean cross-entropy of each group of rows, f32[N, P].

    Args:
      parts: components that the config builds.
      net: the network, in evaluation mode.
      state: state with the network's parameters and statistics.
      gradients: "all" or "head", see `make`.
      images: f32[N,R,H,W,C].
      labels: i32[N,R].
      mask: bool[N,R], rows that count.
    """

    def gradient(params, stats, inputs, labels, mask):
        def loss(params):
            if gradients == "head":
                logits = net.logits(params, inputs)
            else:
                logits = net(params, stats, inputs, train=False)[0].logits
            return losses.cross_entropy(logits, labels, example_mask=mask)

        return flatten_util.ravel_pytree(jax.grad(loss)(params))[0]

    params, stats = state.params, state.stats
    if gradients == "head":
        flat = images.reshape(-1, *images.shape[2:])
        features = net(params, stats, flat, train=False)[0].features
        images = features.reshape(*labels.shape, -1)
        params = {"head": params["head"]}
    elif sharding.on_cpu():
        gradient = jax.jit(gradient)  # traced once, however many groups
        groups = zip(images, labels, mask, strict=True)
        return jnp.stack([gradient(params, stats, *group) for group in groups])
    by_group = jax.vmap(gradient, in_axes=(None, None, 0, 0, 0))
    return by_group(params, stats, images, labels, mask)
