"""List the policies that config.replay.policy names, all of one signature."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxcl import schema
from jaxcl.memory import loss_aware, policies


class Policy(NamedTuple):
    """A replay policy as methods call it.

    Functions of `policies` take only what they read, so that they work without a
    method. This record gives them one signature, with the items that each reads.
    """

    # (buffer, state, key, items, mask) -> (slots i32[B], state). `items` are those of
    # the incoming rows, with the fields that `reads` names.
    choose: Callable
    # (num_classes, num_tasks) -> state before the first row, such as counts
    start: Callable = lambda num_classes, num_tasks: {}
    # (num_classes, num_tasks) -> smallest capacity
    least: Callable = lambda num_classes, num_tasks: 1
    # Items that the policy reads: "label" and "task" i32[], which every method stores,
    # or those that its function names.
    reads: tuple[str, ...] = ()


def _adapt_policy(function, *takes, counts=(), reads=None, **fields) -> Policy:
    """Wrap a function (buffer, *counts, *takes, mask) -> slots, *counts as a policy.

    Args:
      takes: "key", or names of items.
      counts: names of what it counts.
      reads: None: the items that it takes.
      fields: of the record.
    """

    def choose(buffer, state, key, items, mask):
        given = [state[name] for name in counts]
        given += [key if name == "key" else items[name] for name in takes]
        found = function(buffer, *given, mask)
        slots, *after = found if counts else (found,)
        return slots, dict(zip(counts, after, strict=True))

    if reads is None:
        reads = tuple(name for name in takes if name != "key")
    return Policy(choose, reads=reads, **fields)


def _adapt_ring(name, groups) -> Policy:
    """Wrap a ring for each class or task as a policy; `groups` names the number."""

    def start_state(*numbers):
        return {"turn": jnp.zeros((groups(*numbers),), jnp.int32)}

    return _adapt_policy(
        policies.ring, name, counts=("turn",), start=start_state, least=groups
    )


POLICIES = {
    "reservoir": _adapt_policy(policies.reservoir, "key"),
    "batched_reservoir": _adapt_policy(policies.batched_reservoir, "key"),
    "fifo": _adapt_policy(policies.fifo),
    "class_balanced": _adapt_policy(
        policies.class_balanced,
        "key",
        "label",
        counts=("met", "full"),
        start=lambda num_classes, num_tasks: {
            "met": jnp.zeros((num_classes,), jnp.int32),
            "full": jnp.zeros((num_classes,), bool),
        },
    ),
    "greedy_balanced": _adapt_policy(
        policies.greedy_balanced,
        "key",
        "label",
        counts=("rank",),
        start=lambda num_classes, num_tasks: {
            "rank": jnp.full((num_classes,), num_classes, jnp.int32)
        },
    ),
    "ring": _adapt_ring("label", lambda num_classes, num_tasks: num_classes),
    "task_ring": _adapt_ring("task", lambda num_classes, num_tasks: num_tasks),
    "min_redundancy": _adapt_policy(
        policies.min_redundancy, reads=("feature", "used", "number")
    ),
    "duel": _adapt_policy(policies.duel, "feature"),
    "loss_aware": _adapt_policy(loss_aware.replace_lowest, reads=("loss", "draws")),
    "loss_aware_reservoir": _adapt_policy(
        loss_aware.replace_in_reservoir, "key", "loss", reads=("loss", "draws")
    ),
    "gss": _adapt_policy(policies.gss, "key", "score"),
}


def look_up(name: str) -> Policy:
    """Look up a policy of `POLICIES`, or make one from the user's own module.

    Raises:
      ValueError: naming config.replay.policy and what is allowed.
    """
    field = "config.replay.policy"
    found = schema.find_named(POLICIES, name, field)
    made = found if name in POLICIES else found()
    return schema.check_made(made, Policy, name, field)
