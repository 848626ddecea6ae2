"""Remove the prefixes of training code from tensor names."""

import re
from collections.abc import Mapping
from typing import TypeVar

from jaxcl.errors import Refused

T = TypeVar("T")
# Parts of names that come from DataParallel, torch.compile, FSDP, activation
# checkpointing, and DeepSpeed.
WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)
_MODEL = re.compile(r"((?:.*\.)?)model\.(stages\.\d+\.(?:downsample_)?layers\..+)")
_CHUNKED = re.compile(r"((?:.*\.)?)blocks\.(\d+)\.(\d+)\.(.+)")
_STAGE = re.compile(r"((?:.*\.)?)(\d+)\.0\.conv1\.weight")


class RefusedTensors(Refused):
    """The error that tensors are incomplete or of another architecture."""


def strip_prefixes(tensors: Mapping[str, T]) -> dict[str, T]:
    """Rename tensors to the names of the bare network.

    Wrappers are removed anywhere in a name. Blocks in chunks (DINOv2) are numbered
    consecutively; the layers of an `nn.Sequential` of torchvision's ResNet get their
    names.

    Raises:
      Refused: two tensors get one name, or a ResNet has unknown layers.
    """
    bare = _rename(tensors, {name: strip_name(name) for name in tensors})
    bare = _rename(bare, _drop_model(bare))
    bare = _rename(bare, _drop_chunks(bare))
    return _rename(bare, _name_numbers(bare))


def strip_name(name: str) -> str:
    """Remove the prefixes of training wrappers from a tensor's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _rename(tensors, names) -> dict:
    """Rename tensors; refuse two tensors with one name."""
    renamed: dict = {}
    for old, x in tensors.items():
        new = names.get(old, old)
        if new in renamed:
            raise RefusedTensors(f"two of its tensors are {new!r} without wrappers")
        renamed[new] = x
    return renamed


def _drop_model(names) -> dict[str, str]:
    """Rename `model.stages.0.layers...` to `stages.0.layers...`.

    transformers puts "model." before all tensors of DINOv3's ConvNeXt except the last
    norm.
    """
    matches = {name: m for name in names if (m := _MODEL.fullmatch(name))}
    return {
        name: m[1] + m[2]
        for name, m in matches.items()
        if f"{m[1]}layer_norm.weight" in names
    }


def _drop_chunks(names) -> dict[str, str]:
    """Rename `blocks.1.7.norm1.weight` to `blocks.7.norm1.weight`."""
    matches = {name: m for name in names if (m := _CHUNKED.fullmatch(name))}
    places: dict[str, set] = {}
    for match in matches.values():
        places.setdefault(match[1], set()).add((int(match[2]), int(match[3])))
    numbers = {
        (prefix, *pair): block
        for prefix, pairs in places.items()
        for pair, block in _number_blocks(pairs).items()
    }
    return {
        name: f"{m[1]}blocks.{numbers[m[1], int(m[2]), int(m[3])]}.{m[4]}"
        for name, m in matches.items()
    }


def _number_blocks(pairs: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Number the blocks of all chunks consecutively; a chunk may restart at 0."""
    if len({block for _, block in pairs}) == len(pairs):
        return {pair: pair[1] for pair in pairs}
    chunks = max(chunk for chunk, _ in pairs) + 1
    sizes = [sum(pair[0] == chunk for pair in pairs) for chunk in range(chunks)]
    complete = {(chunk, i) for chunk, size in enumerate(sizes) for i in range(size)}
    if pairs != complete or {*sizes[:-1]} != {sizes[0]} or sizes[-1] > sizes[0]:
        raise RefusedTensors(
            f"its blocks lie in chunks of {sizes}, and some are missing"
        )
    return {pair: number for number, pair in enumerate(sorted(pairs))}


def _name_numbers(tensors) -> dict[str, str]:
    """Rename `4.0.conv1.weight` to `layer1.0.conv1.weight`, and so on."""
    stages: dict[str, list[int]] = {}
    for name in tensors:
        if match := _STAGE.fullmatch(name):
            stages.setdefault(match[1], []).append(int(match[2]))
    names = {}
    for prefix, numbers in stages.items():
        if sorted(numbers) != [*range(min(numbers), min(numbers) + 4)]:
            continue
        layers = _map_numbers(tensors, prefix, min(numbers))
        for name in tensors:
            number, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and number.isdecimal() and int(number) in layers:
                names[name] = f"{prefix}{layers[int(number)]}.{rest}"
    return names


def _map_numbers(tensors, prefix, first) -> dict[int, str]:
    """Map numbers in the `nn.Sequential` to torchvision's names.

    Between batch norm and first stage there is a ReLU, and after 7 x 7 a max pool.
    """
    stem = [
        n
        for side, n in {7: first - 4, 3: first - 3}.items()
        if getattr(tensors.get(f"{prefix}{n}.weight"), "shape", ())[2:] == (side, side)
    ]
    if len(stem) != 1:
        raise RefusedTensors(
            f"the first convolution before {prefix}{first} is not supported: must be "
            "7 x 7 with a max pool, or 3 x 3 without"
        )
    layers = {stem[0]: "conv1", stem[0] + 1: "bn1", first + 5: "fc"}
    return layers | {first + i: f"layer{i + 1}" for i in range(4)}
