"""Count the updates on a batch that fit a budget of FLOPs: config.replay.flops."""

from collections.abc import Callable

from jaxcl.errors import Refused


def updates(
    per_image: float, images: int, flops: Callable[[int], int | None], name: str
) -> int:
    """Find the largest number of updates whose FLOPs for each image fit the budget.

    Updates on a batch are written out one after another, so that every one after the
    first costs what the second does.

    Args:
      per_image: FLOPs that a step may take for each incoming image.
      images: number of images in a batch.
      flops: number of updates -> FLOPs of a step with them, None if not known.
      name: name of the method, for messages.

    Raises:
      Refused: one update costs more, further ones cost nothing, or the FLOPs of a
        step cannot be counted.
    """
    field = f"config.replay.flops={per_image:g}"
    first, both = flops(1), flops(2)
    if first is None or both is None:
        raise Refused(
            f"{field}: the FLOPs of a step of {name!r} cannot be counted here; set "
            "config.replay.updates instead"
        )
    if both <= first:
        raise Refused(
            f"{field}: further updates of {name!r} cost nothing; leave it out"
        )
    allowed = per_image * images
    if allowed < first:
        raise Refused(
            f"{field}: one update of {name!r} takes {first / images:.4g} for each "
            "image; must be at least that"
        )
    return 1 + int((allowed - first) // (both - first))
