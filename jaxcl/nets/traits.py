"""Attributes of encoders that methods and configs read."""

from typing import Any, NamedTuple

from jaxcl.errors import Refused


class Traits(NamedTuple):
    """Attributes of an encoder; only `dtype` is required.

    An encoder is called with (images, *, train, groups), see `core.Parts`.
    """

    dtype: Any = None  # type of the computation; heads behind it compute in it, too
    num_features: int | None = None  # D, for heads that are as wide as the encoder
    # Largest share of branches to drop; above 0 the call also takes `key`.
    drop_path: float = 0.0
    frozen: tuple[str, ...] = ()  # entries of its parameters that never train
    start: str = "torch"  # start of layers behind it, see `layers.linear_initializers`


def read_traits(encoder: Any) -> Traits:
    """Read the traits that an encoder has; take the defaults for the others."""
    traits = {x: getattr(encoder, x) for x in Traits._fields if hasattr(encoder, x)}
    return Traits(**traits)


def check_encoder(encoder: Any, field: str, name: str) -> None:
    """Refuse a module that is no encoder; `field` and `name` are for the message."""
    lacking = [x for x in ("apply", "init_with_output") if not hasattr(encoder, x)]
    lacking += ["dtype"] if read_traits(encoder).dtype is None else []
    if lacking:
        raise Refused(
            f"{field}={name!r}: makes a {type(encoder).__name__} without "
            f"{', '.join(lacking)}; must be a flax module with the attribute `dtype`"
        )
