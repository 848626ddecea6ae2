"""Contrastive and continual representation learning in JAX and Flax.

`jaxcl.fit(images)` trains an encoder on images and returns it with what was measured;
`jaxcl.Result(folder)` opens a run that exists already.

Losses, memories and metrics are functions of arrays, to be imported by themselves:

    from jaxcl.losses import contrastive, distill
    from jaxcl.memory import buffer, duel

`jaxcl.load_encoder(folder)` reads an encoder that `jaxcl export` wrote, or a run's.
`python -m jaxcl.main --config=...` starts a run, see README.md.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors, which then complete what is imported late
    from jaxcl.api.fit import fit as fit
    from jaxcl.api.load import load_encoder as load_encoder
    from jaxcl.api.result import Result as Result

    __version__: str

__all__ = ["Result", "__version__", "fit", "load_encoder"]
_WHERE = {
    "Result": "jaxcl.api.result",
    "fit": "jaxcl.api.fit",
    "load_encoder": "jaxcl.api.load",
}


def __getattr__(name):
    """Import a public name on its first use, so that `import jaxcl` is fast."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name == "__version__":
        return _read_version()
    raise AttributeError(f"module 'jaxcl' has no attribute {name!r}")


def _read_version() -> str:
    """Return the version of jaxcl, "unknown" where it is not installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return metadata.version("jaxcl")
    except metadata.PackageNotFoundError:
        return "unknown"


def __dir__():
    return [*globals(), *__all__]
