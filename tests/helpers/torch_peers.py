"""PyTorch's libraries of encoders, imported where they are installed."""

import importlib
import sys
import warnings

import pytest

# PyPI's torchvision is built for CUDA. Beside a PyTorch without it, its own operators
# are missing, and its import fails for want of these two. No encoder uses them.
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_KEPT = []  # a library of operators lives as long as its object


def library(name):
    """timm, transformers or torchvision; skips the test where it is not installed."""
    reason = f"{name} is not installed: pip install --group peers"
    torch = pytest.importorskip("torch", reason=reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own, and not of their encoders
        _torchvision(torch)
        return pytest.importorskip(name, reason=reason)


def _torchvision(torch):
    """Import torchvision, which timm imports, with or without its operators."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:  # an operator does not exist
        for name in [x for x in sys.modules if x.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in _OPERATORS:
            _KEPT[0].define(operator)
        importlib.import_module("torchvision")
