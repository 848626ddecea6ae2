"""MoCo v2+: keys of a slow network attract, a queue of earlier keys repels."""

from jaxcl import core, schema
from jaxcl.losses import contrastive, distill
from jaxcl.losses import streaming as streaming_lib
from jaxcl.memory import queue
from jaxcl.methods.two_view import forms, records


@schema.debug(queue_size=64)
def make(
    *,
    temperature: schema.Temperature = 0.2,
    distill_temperature: schema.Temperature = 0.2,
    queue_size: schema.Count = 65536,
    momentum_start: schema.Share = 0.99,
    momentum_end: schema.Share = 0.999,
    form: records.Form = "code",
    streaming: bool = False,
) -> records.Base:
    """Contrast both views with queues of keys: MoCo v2+ (He et al., CVPR 2020).

    Args:
      temperature: of the loss.
      distill_temperature: of CaSSLe's term, and of PNR's second one.
      queue_size: rows of each queue; at least the global batch.
      momentum_start, momentum_end: of the slow network, over each task.
      form: "code" or "paper", of CaSSLe's term and of PNR.
      streaming: make no matrix of logits, which takes less memory (`losses.streaming`).
    """
    logsumexp = streaming_lib.logsumexp if streaming else None

    def loss(x):
        q1, q2, k1, k2 = core.split_views(x.z, x.k)
        bank1, bank2 = x.state.rows
        # The query of one view meets key and negatives of the other.
        terms = (
            contrastive.info_nce(
                *rows,
                temperature=temperature,
                unit_negatives=True,
                logsumexp=logsumexp,
            )
            for rows in ((q1, k2, bank2), (q2, k1, bank1))
        )
        return sum(terms) / 2

    def pnr(x, pn1, pn2):
        return distill.pnr_moco(
            *core.split_views(x.z, x.k, x.p, x.f),
            x.state.rows,
            x.frozen_queue,
            temperature=temperature,
            distill_temperature=distill_temperature,
            form=form,
            pn1=pn1,
            pn2=pn2,
            unit_queues=True,
            logsumexp=logsumexp,
        )

    return records.Base(
        loss,
        forms.distil_contrast(distill_temperature, form, logsumexp),
        pnr,
        linear_lr=3.0,
        momentum=(momentum_start, momentum_end),
        # The released code hands g the already normalised query.
        distiller_input=core.l2_normalize,
        one_row=True,
        init_state=lambda key, dim: queue.start_queue(key, queue_size, dim),
        update=lambda state, x, **how: queue.push_features(state, x.k, **how),
        queue_size=queue_size,
    )
