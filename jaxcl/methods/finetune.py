"""Fine-tuning: cross-entropy of the incoming rows, and nothing against forgetting.

In the joint scenario it is the "iid" of Caccia et al. (2021); with `double` their
"iid++", which sees as many rows again, drawn from the whole train split apart, as
replaying methods do; with several epochs "iid offline".
"""

from jaxcl import core
from jaxcl.losses import replay as losses
from jaxcl.methods import online


def make(parts: core.Parts, *, head="linear", double=False) -> core.Method:
    """Cross-entropy over all classes, one head.

    Args:
      head: "linear" or "cosine".
      double: add the mean over a second batch, of the whole train split.
    """
    net = online.network(parts, head)

    def loss_of(params, stats, rows):
        outputs, stats = net(params, stats, rows.images, train=True)
        return losses.cross_entropy(outputs.logits, rows.label), stats

    def update(state, incoming, key):
        def loss(params):
            return loss_of(params, state.stats, incoming)

        return *online.descend(parts, state, loss), {}

    def update_double(state, incoming, key):
        def loss(params):
            first, stats = loss_of(params, state.stats, incoming)
            more, stats = loss_of(params, stats, incoming.labelled)
            return first + more, stats

        return *online.descend(parts, state, loss), {}

    return online.method(
        parts, net, update_double if double else update, limit=False,
        remembers=False, labelled=double,
    )  # fmt: skip
