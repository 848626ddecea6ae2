"""An online method: experience replay whose right class must win by a margin.

The additive margin of AM-Softmax (Wang et al., IEEE Signal Processing Letters 2018,
Eq. 6): the logit of the row's own class is lowered before the cross-entropy. Incoming
and replayed rows count the same. `methods.online` has the memory, the step and the
prediction.

Use it with --config.method.name=my_package.my_online.
"""

import jax

from jaxcl import core, schema
from jaxcl.losses import replay
from jaxcl.methods import online


def subtract_margin(logits, label, margin):
    """Lower the logit of each row's class.

    Args:
      logits: f32[B, C].
      label: i32[B]; a row without a label has -1 and stays as it is.
      margin: number that is subtracted.
    """
    return logits - margin * jax.nn.one_hot(label, logits.shape[-1])


@schema.checked("config.method")
@schema.debug(margin=1.0)
def make(
    parts: core.Parts, *, margin: schema.Weight = 3.5, head: online.Head = "cosine"
) -> core.Method:
    """Make the method; its keyword arguments are options of config.method.

    Args:
      parts: components that the config builds: encoder, optimizer, replay.
      margin: amount by which the logit of the right class is lowered. Cosines are
        multiplied by 10: 3.5 is a margin of 0.35.
      head: "cosine" or "linear".
    """
    net = online.build_network(parts, head)

    def update(state, incoming, key):
        """Take a step; return the state, metrics, and what to store beside images."""
        replayed = online.draw_rows(parts, state.extra.memory, key)

        def loss(params):
            (new, old), stats = net.pass_together(
                params, state.stats, incoming, replayed
            )
            rows = ((new, incoming), (old, replayed))
            values = [
                replay.cross_entropy(
                    subtract_margin(outputs.logits, batch.label, margin),
                    batch.label,
                    example_mask=batch.mask,  # the memory may hold too few rows
                )
                for outputs, batch in rows
            ]
            return sum(values), stats

        return *online.descend(parts, net, state, loss), {}

    return online.make_method(parts, net, update)
