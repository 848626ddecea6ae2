"""Bring weights: `python -m jaxcl.bring --from=FILE --architecture=NAME --out=DIR`.

FILE is a safetensors file, or what PyTorch's `torch.save` wrote of a state dict, which
is read without running it. DIR is then a folder as `python -m jaxcl.export` writes one,
which `jaxcl.load_encoder(DIR)` reads.
"""

import argparse
import datetime
import sys
from collections.abc import Callable

from etils import epath

from jaxcl import schema
from jaxcl.bring import architectures, files
from jaxcl.data import storage
from jaxcl.export import command as export_command
from jaxcl.export import encoder
from jaxcl.nets import convnext, resnet, vit
from jaxcl.run import folder as folder_lib
from jaxcl.run import lock
from jaxcl.run import results as results_lib


def bring(
    source: str,
    architecture: str,
    out: str,
    *,
    prefix: str | None = None,
    heads: int | None = None,
    features: str | None = None,
    stem_padding: int | None = None,
    size: int | None = None,
    resize: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    force: bool = False,
) -> dict:
    """Write the encoder of a file to a folder.

    Args:
      source: a file, see `files.read`. Beside one of transformers its config.json is
        read.
      architecture: a name in `architectures.ARCHITECTURES`.
      out: the folder; it must be missing, empty, or hold the same encoder.
      prefix: of the names of its tensors, where the file holds several networks.
      heads: of the attention; None: those of the architecture's published sizes.
      features: of a ViT, as in `nets.vit.vit`; None: the class token.
      stem_padding: of a ResNet whose first convolution is 3 x 3, which needs it.
      size, resize, mean, std: how images are prepared; None: as the architecture's.
      force: replace another encoder.

    Returns:
      The contents of card.json.

    Raises:
      ValueError: the file is damaged, or not of the architecture; an option is wrong;
        how images are to be prepared is not known; the folder holds something else.
      OSError: a file cannot be read or written.
    """
    known = architectures.get(architecture)
    if heads is not None:
        schema.check_value(heads, schema.Count, "--heads")
    if stem_padding is not None and known.kind != "resnet":
        raise ValueError("--stem-padding: is of ResNets")
    tensors, hashes = files.read(source)
    try:
        own, prefix = architectures.within(tensors, prefix)
        scheme = architectures.scheme_of(own)
        stated = _stated(source, scheme) | ({"heads": heads} if heads else {})
        section = _section(
            own, scheme, known, architecture, stated, features, stem_padding
        )
        inputs = _inputs(own, scheme, section, known, architecture, size, resize)
        inputs |= _moments(known, architecture, inputs["channels"], mean, std)
        leaves, dropped = architectures.filled(own, scheme, section, inputs["size"])
    except architectures.Refused as error:
        raise ValueError(f"--from={source}: {error}") from error
    network = encoder.from_leaves({"encoder": section, "input": inputs}, leaves)
    packed = {folder_lib.TENSORS: export_command.packed(leaves, "flax")}
    others = sorted(tensors.keys() - {prefix + name for name in own})
    card = {
        "format": folder_lib.FORMAT,
        "encoder": section,
        "num_features": network.num_features,
        "parameters": sum(x.size for n, x in leaves.items() if n.startswith("params/")),
        "input": inputs,
        "brought": {
            "architecture": architecture,
            "names": scheme,
            "files": hashes,
            "prefix": prefix,
            "dropped": dropped,
            "others": len(others),
            "licence": known.licence or None,
        },
        "files": export_command.hashes(packed),
        "torch": None,
        "versions": export_command.versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    card = results_lib.plain(card)
    return export_command.write(epath.Path(out), packed, card, force)


def _section(
    tensors, scheme, known, architecture, stated, features, stem_padding
) -> dict:
    """The "encoder" of the card."""
    kind = architectures.kind_of(scheme)
    if kind != known.kind:
        raise architectures.Refused(
            f"it is a {kind}, and --architecture={architecture} is a {known.kind}"
        )
    make: Callable
    if kind != "vit":
        if stated or features:
            raise ValueError("--heads and --features: are of Vision Transformers")
        if kind == "resnet":
            make = resnet.resnet
            options = architectures.resnet_section(tensors, stem_padding)
        else:
            make = convnext.convnext
            options = architectures.convnext_section(tensors, scheme)
    else:
        given = stated | ({"features": features} if features else {})
        options = architectures.vit_section(tensors, scheme, known, given)
        make = vit.vit
        rotary = options["positions"] == "rotary"
        if rotary != (architecture == "dinov3"):
            raise architectures.Refused(
                f"it has {'no' if rotary else 'a'} table of positions, and "
                f"--architecture={architecture} has {'one' if rotary else 'none'}"
            )
    full = schema.defaults(make) | options
    full.pop("dtype")
    try:
        make(**full)
    except ValueError as error:
        raise architectures.Refused(f"its network cannot be made: {error}") from error
    return {"name": kind, **full, "precision": "float32"}


def _stated(source, scheme) -> dict:
    """Heads and epsilon as a config.json of transformers beside the file has them."""
    path = epath.Path(source).parent / "config.json"
    transformer = architectures.kind_of(scheme) == "vit"
    if not (transformer and scheme.startswith("transformers") and path.exists()):
        return {}
    try:
        config = storage.read_json(path)
        found = {
            "heads": config["num_attention_heads"],
            "epsilon": config["layer_norm_eps"],
        }
        activation = config.get("hidden_act", "gelu")
    except (storage.NotJson, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: it is no config of a ViT: {error!r}") from error
    if activation not in ("gelu", "silu"):
        raise ValueError(
            f"{path}: hidden_act={activation!r}: no network here has it; must be "
            "'gelu', or 'silu' where the MLP is gated"
        )
    return found


def _inputs(tensors, scheme, section, known, architecture, size, resize) -> dict:
    """The "input" of the card, without mean and std."""
    usual = known.images
    if usual is None and size is None:
        raise ValueError(
            f"--size: how --architecture={architecture} prepares its images is not "
            "known; give --size, --mean and --std, or a narrower architecture, as "
            "'augreg' or 'deit'"
        )
    size = usual.size if size is None else size
    if resize is None:
        same = usual is not None and usual.size == size
        resize = usual.resize if same else size
    schema.check_value(size, schema.Pixels, "--size")
    schema.check_value(resize, schema.Pixels, "--resize")
    if resize < size:
        raise ValueError(f"--resize={resize}: must be at least --size={size}")
    patch = section.get("patch", 1)
    if section["name"] == "vit" and (size % patch or size < patch):
        raise ValueError(f"--size={size}: must be a multiple of its patches of {patch}")
    if section["name"] == "convnext":
        least = patch * 2 ** (len(section["depths"]) - 1)
        if size < least:
            raise ValueError(f"--size={size}: must be {least} or more for its stages")
    return {
        "kind": "images",
        "dtype": "uint8",
        "channels": tensors[architectures.stem(scheme)].shape[1],
        "size": size,
        "resize": resize,
        "interpolation": "bicubic" if usual is None else usual.interpolation,
        "decoder": None,
    }


def _moments(known, architecture, channels, mean, std) -> dict:
    """Mean and standard deviation of pixels from 0 to 1."""
    usual = known.images.moments if known.images else (None, None)
    found = {}
    for name, own, given in zip(("mean", "std"), usual, (mean, std), strict=True):
        value = own if given is None else given
        if value is None:
            raise ValueError(
                f"--{name}: how --architecture={architecture} prepares its images is "
                "not known; give --mean and --std"
            )
        if len(value) not in (1, channels):
            raise ValueError(
                f"--{name}={value}: must be one number, or one for each of its "
                f"{channels} channels"
            )
        for number in value:
            most = schema.Range(0, 1) if name == "mean" else schema.Range(above=0)
            if wrong := most.refusal(number):
                raise ValueError(f"--{name}={number}: must be {wrong}")
        found[name] = list(value)
    return found


def text(card: dict) -> str:
    """A summary of a card."""
    section, brought = card["encoder"], card["brought"]
    lines = [
        f"{section['name']} by the names of {brought['names']}, "
        f"{card['parameters']:,} parameters, {card['num_features']} features"
    ]
    if section["name"] == "vit":
        lines.append(
            f"heads={section['heads']} epsilon={section['epsilon']} "
            f"positions={section['positions']}, resized {section['resize']!r}: no "
            "tensor says so"
        )
    given = card["input"]
    shown = {name: given[name] for name in ("size", "resize", "mean", "std")}
    lines.append(f"images: {shown}, {given['interpolation']}")
    dropped = [n for n in brought["dropped"] if not n.endswith(architectures.COUNTERS)]
    if dropped:
        more = f" and {len(dropped) - 8} more" if len(dropped) > 8 else ""
        lines.append(f"left out: {', '.join(dropped[:8])}{more}")
    if brought["licence"]:
        lines.append(f"licence of these weights: {brought['licence']}")
    return "\n".join(lines)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be numbers with commas between"
        ) from error


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = argparse.ArgumentParser(
        prog="jaxcl import", description=__doc__.splitlines()[0]
    )
    add = options.add_argument
    add("--from", dest="source", required=True, help="a file of weights")
    names = tuple(architectures.ARCHITECTURES)
    add("--architecture", required=True, help=f"one of {', '.join(names)}")
    add("--out", required=True, help="folder, new or of the same weights")
    add("--prefix", help="of names, where a file holds several networks")
    add("--heads", type=int, help="of the attention; no tensor says how many")
    add("--features", choices=("class", "mean", "both"), help="of a ViT")
    add("--stem-padding", type=int, help="of a ResNet's first convolution of 3 x 3")
    add("--size", type=int, help="pixels of a side, as the network is given them")
    add("--resize", type=int, help="the shorter side, before the middle is cut")
    add("--mean", type=_numbers, help="of pixels from 0 to 1, as 0.5,0.5,0.5")
    add("--std", type=_numbers, help="the same")
    add("--force", action="store_true", help="replace another encoder")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit code 2 if the file or the folder is wrong."""
    options = parser().parse_args(argv)
    try:
        card = bring(**vars(options))
    except (ValueError, OSError, lock.Held) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    print(text(card))
    print(f"jaxcl.load_encoder({options.out!r})")
    return 0
