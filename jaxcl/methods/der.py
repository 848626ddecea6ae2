"""DER and DER++: stored logits are matched, dark experience replay.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple
Baseline", NeurIPS 2020; in the online setting, and with ER-ACE's loss, as in Caccia
et al., "Reducing Representation Drift in Online Continual Learning", 2021 (Fig. 6).

Departures:
- The mean over rows and classes of the squared differences, as in the released code;
  the paper's norm sums over classes.
- No code of DER++ with ACE was released. `ace` is read as: the cross-entropy of the
  incoming rows goes over the classes of their batch, the rest stays.
- `draws="disjoint"` is the code of Caccia et al., one draw cut in two; while the
  memory holds fewer rows than that both parts get half of them.
"""

import math

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import replay as losses
from jaxcl.methods import online
from jaxcl.methods.online import probe


def make(
    parts: core.Parts,
    *,
    head="linear",
    alpha=0.1,
    beta=0.0,
    ace=False,
    draws="independent",
) -> core.Method:
    """Cross-entropy of incoming rows, and replayed rows answer as when stored.

    What is stored are the logits of the incoming pass, before the step, with the image
    as it came; they are never refreshed.

    Args:
      head: "linear" or "cosine".
      alpha: weight of the squared differences to stored logits.
      beta: weight of the cross-entropy of further replayed rows: DER++ where it is
        above 0, with 0.5 in the paper for the most part.
      ace: incoming rows compete over the classes of their batch alone, as in ER-ACE;
        predictions then are among the classes seen so far.
      draws: DER++ draws twice, "independent"; or "disjoint", never a row in both.
    """
    core.check_choice("config.method.draws", draws, ("independent", "disjoint"))
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 <= value < math.inf:
            raise ValueError(f"config.method.{name}={value}: must be at least 0")
    net, disjoint = online.network(parts, head), draws == "disjoint"

    def update(state, incoming, key):
        memory, count = state.extra.memory, 1 if beta == 0 else 2
        replayed, *more = several(parts, memory, key, count, disjoint=disjoint)
        present = jnp.zeros(parts.num_classes, bool).at[incoming.label].set(True)

        def loss(params):
            (new, old), stats = net.both(params, state.stats, incoming, replayed)
            value = losses.cross_entropy(
                new.logits, incoming.label, class_mask=present if ace else None
            )
            value += alpha * losses.der(
                old.logits, replayed.items["logits"], example_mask=replayed.mask
            )
            for rows in more:
                again, stats = net.replay(params, stats, rows)
                value += beta * losses.cross_entropy(
                    again.logits, rows.label, example_mask=rows.mask
                )
            return value, (stats, new.logits)

        found = probe.gradient(parts, state, loss)
        (value, (stats, logits)), grads, more_metrics = found
        state, metrics = online.move(parts, state, value, stats, grads)
        return state, metrics | more_metrics, {"logits": logits}

    return online.method(
        parts, net, update, items=lambda logits: {"logits": logits}, limit=ace
    )


def several(parts: core.Parts, memory, key, count: int, *, disjoint: bool) -> list:
    """That many draws of config.replay.size rows each, `online.Rows`.

    Args:
      disjoint: no row is in two of them; each has its share of the rows that exist.
    """
    if not disjoint or count == 1:
        keys = jax.random.split(key, count)
        return [online.draw(parts, memory, each) for each in keys]
    if memory.capacity < count:
        raise ValueError(
            f"config.replay.capacity={memory.capacity}: must be at least {count} with "
            "config.method.draws='disjoint'"
        )
    rows = online.draw(parts, memory, key, size=count * parts.replay.size)
    # Rows that exist come first.
    return [jax.tree.map(lambda x, i=i: x[i::count], rows) for i in range(count)]
