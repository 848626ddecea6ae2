"""Contrastive and continual representation learning in JAX and Flax."""

import importlib
import importlib.metadata


def __getattr__(name):
    """What takes its time to import is imported when it is asked for."""
    if name == "load_encoder":
        return importlib.import_module("jaxcl.export.encoder").load_encoder
    if name == "__version__":
        try:
            return importlib.metadata.version("jaxcl")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
    raise AttributeError(f"module 'jaxcl' has no attribute {name!r}")
