"""DER and DER++, dark experience replay: replayed rows keep their stored logits.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple
Baseline", NeurIPS 2020; in the online setting, and with ER-ACE's loss, as in Caccia
et al., "Reducing Representation Drift in Online Continual Learning", 2021 (Fig. 6).

Departures:
- The mean over rows and classes of the squared differences, as in the released code;
  the paper's norm sums over classes.
- No code of DER++ with ACE was released. Our `ace` takes the cross-entropy of incoming
  rows over the classes of their batch and changes nothing else.
- `draws="disjoint"` is the code of Caccia et al., one draw cut in two; while the
  memory holds fewer rows, each part gets half of them.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.losses import replay as losses
from jaxcl.memory import buffer
from jaxcl.methods import online


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    alpha: schema.Weight = 0.1,
    beta: schema.Weight = 0.0,
    ace: bool = False,
    draws: Literal["independent", "disjoint"] = "independent",
) -> core.Method:
    """Learn incoming rows; keep logits of replayed rows near the stored ones.

    The memory stores images without augmentation, and their logits in the incoming
    pass, before the step; these are never refreshed.

    Args:
      head: "linear" or "cosine".
      alpha: weight of the squared differences to stored logits.
      beta: weight of the cross-entropy of further replayed rows; above 0 the method is
        DER++, mostly with 0.5 in the paper.
      ace: incoming rows compete over the classes of their batch alone, as in ER-ACE;
        predictions are then among the classes seen so far.
      draws: DER++ draws twice, "independent", or "disjoint" with no row in both.

    Raises:
      Refused: naming field, value and range.
    """
    net, disjoint = online.build_network(parts, head), draws == "disjoint"
    if disjoint and beta and parts.replay.capacity < 2:
        raise Refused(
            f"config.replay.capacity={parts.replay.capacity}: must be at least 2 with "
            "config.method.draws='disjoint'"
        )

    def update(state, incoming, key):
        memory, count = state.extra.memory, 1 if beta == 0 else 2
        draws = several(parts, memory, key, count, disjoint=disjoint)
        replayed = draws[0]
        present = jnp.zeros(parts.num_classes, bool).at[incoming.label].set(True)

        def loss(params):
            (new, old, *again), stats = net.pass_together(
                params, state.stats, incoming, *draws
            )
            value = losses.cross_entropy(
                new.logits, incoming.label, class_mask=present if ace else None
            )
            value += alpha * losses.der(
                old.logits, replayed.items["logits"], example_mask=replayed.mask
            )
            for outputs, rows in zip(again, draws[1:], strict=True):
                value += beta * losses.cross_entropy(
                    outputs.logits, rows.label, example_mask=rows.mask
                )
            return value, (stats, new.logits)

        (value, (stats, logits)), grads, measured = net.gradient(state, loss)
        state, metrics = online.apply_grads(parts, state, value, stats, grads)
        return state, metrics | measured, {"logits": logits}

    return online.make_method(
        parts, net, update, items=lambda logits: {"logits": logits}, seen_only=ace
    )


def several(
    parts: core.Parts,
    memory: buffer.Buffer,
    key: jax.Array,
    count: int,
    *,
    disjoint: bool,
) -> list[online.Rows]:
    """Draw `count` times config.replay.size rows.

    Args:
      parts: components that the config builds.
      memory: memory that is drawn from, with at least `count` slots.
      key: threefry key.
      count: number of draws.
      disjoint: no row is in two draws; each draw gets its share of the existing rows.
    """
    if not disjoint or count == 1:
        keys = jax.random.split(key, count)
        return [online.draw_rows(parts, memory, k_draw) for k_draw in keys]
    rows = online.draw_rows(parts, memory, key, size=count * parts.replay.size)
    # Rows that exist come first.
    return [jax.tree.map(lambda x, i=i: x[i::count], rows) for i in range(count)]
