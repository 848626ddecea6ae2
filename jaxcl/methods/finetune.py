"""Fine-tuning: cross-entropy of the incoming rows, and nothing against forgetting.

In the joint scenario it is the "iid" of Caccia et al. (2021), with several epochs their
"iid offline". With `double` it is their "iid++", which trains on a second batch in each
step, drawn from the whole train split.
"""

from jaxcl import core, schema
from jaxcl.methods import online


@schema.checked("config.method")
def make(
    parts: core.Parts, *, head: online.Head = "linear", double: bool = False
) -> core.Method:
    """Learn all classes with one head, by cross-entropy.

    Args:
      head: "linear" or "cosine".
      double: add the mean over a second batch, drawn from the whole train split.
    """
    net = online.build_network(parts, head)

    def update(state, incoming, key):
        rows = (incoming, incoming.labelled) if double else (incoming,)

        def loss(params):
            return online.cross_entropy(net, params, state.stats, *rows)

        return *online.descend(parts, net, state, loss), {}

    return online.make_method(
        parts, net, update, seen_only=False, has_memory=False, labelled=double
    )
