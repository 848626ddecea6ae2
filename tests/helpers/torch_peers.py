"""PyTorch's libraries of encoders, imported where they are installed."""

import importlib
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
    reason = f"{name} is not installed: pip install -e '.[peers]'"
    torch = pytest.importorskip("torch", reason=reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own, and not of their encoders
        if not _KEPT and importlib.util.find_spec("torchvision"):
            _KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
            for operator in _OPERATORS:
                known = hasattr(torch.ops.torchvision, operator.partition("(")[0])
                if not known:
                    _KEPT[0].define(operator)
        return pytest.importorskip(name, reason=reason)
