"""Contrastive and continual representation learning in JAX and Flax.

Losses, memories and metrics are functions of arrays, to be imported by themselves:

    from jaxcl.losses import contrastive, distill
    from jaxcl.memory import buffer, duel

`jaxcl.load_encoder(folder)` reads an encoder that `python -m jaxcl.export` wrote.
`python -m jaxcl.main --config=...` starts a run, see README.md.
"""

import importlib
import importlib.metadata

__all__ = ["__version__", "load_encoder"]


def __getattr__(name):
    """The public face, imported when it is asked for: `import jaxcl` takes no time."""
    if name == "load_encoder":
        return importlib.import_module("jaxcl.export.encoder").load_encoder
    if name == "__version__":
        try:
            return importlib.metadata.version("jaxcl")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
    raise AttributeError(f"module 'jaxcl' has no attribute {name!r}")


def __dir__():
    return [*globals(), *__all__]
