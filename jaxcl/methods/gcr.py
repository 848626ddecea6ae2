"""GCR: the memory is a weighted coreset, chosen again after every task.

Tiwari et al., "GCR: Gradient Coreset Based Replay Buffer Selection for Continual
Learning", CVPR 2022, without its optional contrastive term.

Departures (the released code cannot run; this is from the formulas):
- Rows of the two memories are mixed in proportion to the rows met, rounded at random;
  the released code rounds down.
- Weights of earlier selections are multiplied by the new ones; the code forgets them.
- Where a group's share holds all its rows, they stay as they are.
- Candidates are not filtered by whether they are classified correctly, as the code does
  where a task has several epochs.
- Gradients of the selection are in evaluation mode, of images without augmentation.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import replay as losses
from jaxcl.memory import buffer, coreset, policies
from jaxcl.methods import gcr_selection, online
from jaxcl.methods.online import probe


class Extra(NamedTuple):
    """Two memories, of earlier tasks and of the present one."""

    memory: buffer.Buffer  # also "logits" f32[C] and "weight" f32; seen: earlier rows
    seen: jax.Array  # bool[C], classes met so far
    kept: core.PyTree
    candidates: buffer.Buffer  # the same items, a reservoir of the present task


def make(
    parts: core.Parts,
    *,
    head="linear",
    alpha=0.1,
    beta=0.5,
    ridge=0.5,
    candidates: int | None = None,
) -> core.Method:
    """DER++ on weighted rows: CE(incoming) + alpha * MSE(logits) + beta * CE(replayed).

    Means over replayed rows are weighted; the last two terms have a draw each. When a
    task ends, each task so far gets an equal part of the memory, and each of its
    classes a share of that, chosen by `coreset.pursuit` so that the gradients of the
    last layer of beta * CE + alpha * MSE add up to those of all rows there were.

    Args:
      head: "linear" or "cosine".
      alpha: weight of the squared differences to stored logits.
      beta: weight of the cross-entropy of replayed rows.
      ridge: of the selection; in the units of squared gradients, so that classes whose
        gradients are small beside it get small weights.
      candidates: rows of the reservoir; None: config.replay.capacity.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """
    for name, value, least in (
        ("alpha", alpha, 0),
        ("beta", beta, 0),
        ("ridge", ridge, 1e-6),
        ("candidates", 1 if candidates is None else candidates, 1),
    ):
        if not least <= value < math.inf:
            raise ValueError(f"config.method.{name}={value}: must be at least {least}")
    if parts.replay:  # the method decides itself
        policy = parts.replay.policy
        core.check_choice("config.replay.policy with gcr", policy, ("reservoir",))
    net = online.network(parts, head)

    def update(state, incoming, key):
        first, second = (mix(parts, state, k) for k in jax.random.split(key))

        def loss(params):
            (new, old), stats = net.both(params, state.stats, incoming, first)
            again, stats = net.replay(params, stats, second)
            value = losses.cross_entropy(new.logits, incoming.label)
            # A mask of weights makes a weighted mean.
            value += alpha * losses.der(
                old.logits,
                first.items["logits"],
                example_mask=first.items["weight"] * first.mask,
            )
            value += beta * losses.cross_entropy(
                again.logits,
                second.label,
                example_mask=second.items["weight"] * second.mask,
            )
            return value, (stats, new.logits)

        found, grads, more = probe.gradient(parts, state, loss)
        value, (stats, logits) = found
        state, metrics = online.move(parts, state, value, stats, grads)
        return state, metrics | more, {"logits": logits}

    def write(state, key, batch, more):
        label, held = batch["label"], state.extra.candidates
        items = {
            "image": batch["image"],
            "label": label,
            "logits": more["logits"],
            "task": jnp.broadcast_to(state.task, label.shape),
            "weight": jnp.ones(label.shape),
        }
        slots = policies.reservoir(held, key, jnp.ones(label.shape, bool))
        held = buffer.write(held, slots, items, after=jax.tree.leaves(state.params)[0])
        return state.replace(extra=state.extra._replace(candidates=held))

    def extra(base, params):
        example = jax.tree.map(lambda x: x[0], base.memory.items)
        held = buffer.create(example, candidates or parts.replay.capacity)
        return Extra(base.memory, base.seen, {}, held)

    end_task = gcr_selection.at_the_end(parts, net, alpha=alpha, beta=beta, ridge=ridge)
    return online.method(
        parts,
        net,
        update,
        write=write,
        extra=extra,
        end_task=end_task,
        limit=False,
        items=lambda logits: {"logits": logits, "weight": jnp.zeros(())},
    )


def mix(parts, state, key) -> online.Rows:
    """Rows of both memories; candidates of the slots that their task will have."""
    k_draw, k_augment = jax.random.split(key)
    memory, held = state.extra.memory, state.extra.candidates
    span = -(-memory.capacity // (state.task + 1))
    drawn = coreset.mixture(k_draw, memory, held, parts.replay.size, span=span)
    return online.taken(parts, k_augment, *drawn)
