"""NNCLR: the nearest of many earlier projections is a view's positive.

Departures:
- Queries and keys are of the global batch.
- Its forms under CaSSLe and PNR are ours. CaSSLe's is that of SimCLR. PNR subtracts a
  cosine, as for bases without negatives. Anchors come from the queue without a
  gradient, so frozen features among their negatives would have no effect.
- The rate of probes is ours, that of SimCLR.
"""

from jaxcl import core, schema
from jaxcl.losses import contrastive
from jaxcl.memory import queue
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import mlp


@schema.debug(predictor_hidden_dim=16, queue_size=64)
def make(
    *,
    temperature: schema.Temperature = 0.1,
    distill_temperature: schema.Temperature = 0.2,
    queue_size: schema.Count = 98304,
    predictor_hidden_dim: schema.Width = 4096,
    form: records.Form = "code",
) -> records.Base:
    """Take neighbours in a queue as positives: NNCLR (Dwibedi et al., ICCV 2021).

    Args:
      temperature: temperature of the loss.
      distill_temperature: temperature of CaSSLe's term.
      queue_size: projections of first views to search for neighbours.
      predictor_hidden_dim: hidden units of its predictor.
      form: "code" or "paper", of CaSSLe's term.
    """
    distil = forms.distil_contrast(distill_temperature, form)

    def loss(x):
        return contrastive.nnclr(
            *core.split_views(x.z, x.o),
            x.state.rows[0],
            temperature=temperature,
        )

    return records.Base(
        loss,
        distil,
        distance="cosine",
        linear_lr=1.0,
        projector=mlp.NEIGHBOURED,
        predictor_hidden_dim=predictor_hidden_dim,
        init_state=lambda key, dim: queue.start_queue(key, queue_size, dim, views=1),
        update=lambda state, x, **how: queue.push_features(state, x.z[:, :1], **how),
    )
