"""LUMP: the base's loss on mixtures of the task's examples with stored ones."""

from jaxcl import schema
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.strategies import stored_examples


@schema.debug(memory_size=32)
def make(
    *, memory_size: schema.Count = 256, mix: schema.Positive = 0.4
) -> records.Strategy:
    """Train on mixtures with stored images: LUMP (Madaan et al., ICLR 2022).

    Args:
      memory_size: number of stored examples.
      mix: mixtures are drawn from Beta(mix, mix).
    """

    def read(state, keys, views, parts):
        stored, mask, items = stored_examples.draw_examples(
            state, keys, len(views), parts
        )
        mixed, _ = stored_examples.mix_examples(keys.mix, mix, views, stored, mask)
        return records.Reading(mixed, drawn=items)

    return records.Strategy(
        mix=mix,
        init_state=lambda setup, key, params, image: stored_examples.create_memory(
            image, memory_size
        ),
        read=read,
        store=stored_examples.write_examples,
    )
