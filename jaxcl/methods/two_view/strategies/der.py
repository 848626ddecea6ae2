"""DER: stored examples keep the projections from the time they were stored."""

from jaxcl import core, schema
from jaxcl.losses import replay
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.strategies import stored_examples


@schema.debug(memory_size=32)
def make(
    *, weight: schema.Weight = 1.0, memory_size: schema.Count = 256
) -> records.Strategy:
    """Keep projections as stored: DER (Buzzega et al., NeurIPS 2020, Sec. 3).

    The loss is base + weight * |z(x') - z'|^2. x' are stored examples under new
    augmentation, z' the projections of their first view when they were stored. Madaan
    et al. (ICLR 2022) apply DER to projections in this way. The term counts from the
    first step, as there: DER knows no tasks.

    Args:
      weight: weight of the term that it adds.
      memory_size: number of stored examples.
    """

    def term(base, x):
        if x.replayed is not None:  # they passed by themselves, one view of each
            return replay.der(x.replayed, x.stored, example_mask=x.stored_mask)
        first, second = (replay.der(z, x.stored) for z in core.split_views(x.z))
        return (first + second) / 2

    def read(state, keys, views, parts):
        stored_views, mask, items = stored_examples.draw_examples(
            state, keys, len(views), parts
        )
        stored = {"stored": items["projection"], "stored_mask": mask}
        return records.Reading(views, stored_views[:, 0], stored, items)

    return records.Strategy(
        term,
        weight,
        stored_momentum=1.0,
        init_state=lambda setup, key, params, image: stored_examples.create_memory(
            image, memory_size, setup.dim
        ),
        read=read,
        store=stored_examples.write_examples,
    )
