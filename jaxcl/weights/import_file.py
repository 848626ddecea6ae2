"""Import weights from another library: `jaxcl import --from=FILE --architecture=NAME`.

FILE is a safetensors file, or a state dict that `torch.save` wrote; PyTorch reads it
without running code. --out becomes a folder as from `jaxcl export`, for
`jaxcl.load_encoder`.
"""

import argparse
from typing import Any

from etils import epath

from jaxcl import numerics, schema
from jaxcl.errors import Refused
from jaxcl.nets import convnext, resnet, vit
from jaxcl.run import encoder_folder, result_file
from jaxcl.weights import (
    architectures,
    encoder,
    files,
    names,
    side_files,
    wrappers,
    writer,
)

_MAKERS = {"vit": vit.vit, "resnet": resnet.resnet, "convnext": convnext.convnext}


@numerics.pinned()
def import_file(
    source: str,
    architecture: str,
    out: str,
    *,
    prefix: str | None = None,
    heads: int | None = None,
    epsilon: float | None = None,
    features: str | None = None,
    stem_padding: int | None = None,
    size: int | None = None,
    resize: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    force: bool = False,
) -> dict:
    """Import the encoder in another library's file into a folder.

    Args:
      source: a file, see `files.read_tensors`; `side_files` reads its neighbours.
      architecture: name that `architectures.find_family` knows.
      out: the folder; it must be missing, empty, or hold the same encoder.
      prefix: start of the tensors' names, if the file holds several networks.
      heads: number of attention heads; None: from neighbouring files or architecture.
      epsilon: epsilon of a ViT's norms; None: as for `heads`.
      features: choice of a ViT's features, as in `nets.vit.vit`; None: the class token.
      stem_padding: padding, required for a ResNet whose first convolution is 3 x 3.
      size, resize, mean, std: preparation of images; None: as for `heads`.
      force: whether to replace another encoder.

    Returns:
      The contents of card.json.

    Raises:
      Refused: the file is damaged, or not of the architecture; an option is wrong or
        missing; two files contradict each other; the folder holds something else.
      OSError: a file cannot be read or written.
    """
    published = architectures.look_up(architecture)
    architecture = architectures.find_family(architecture)
    tensors, hashes = files.read_tensors(source)
    try:
        chosen, prefix, others = architectures.pick_network(tensors, prefix)
        scheme = architectures.find_scheme(chosen)
        facts = side_files.read_folder(epath.Path(source).parent, scheme)
        flags = {"heads": heads, "epsilon": epsilon, "features": features}
        flags = {name: value for name, value in flags.items() if value is not None}
        arguments = facts, flags, stem_padding
        section = _make_section(chosen, scheme, architecture, *arguments)
        channels = architectures.channels(chosen, scheme)
        prepared = (published.images or {}) | facts.images
        inputs = {
            "kind": "images",
            "dtype": "uint8",
            "channels": channels,
            **_find_sizes(section, prepared, size, resize),
            **_find_moments(prepared, channels, mean, std),
            "decoder": None,
        }
        shapes = encoder.array_shapes({"encoder": section, "input": inputs})
        leaves, dropped = architectures.fill_arrays(chosen, scheme, shapes)
    except wrappers.RefusedTensors as error:
        raise Refused(f"--from={source}: {error}") from error
    card: dict[str, Any] = {"encoder": section, "input": inputs}
    network = encoder.make_from_leaves(card, leaves)
    packed = {encoder_folder.TENSORS: writer.pack_tensors(leaves, "flax")}
    card |= writer.describe(network, packed) | {
        "imported": {
            "architecture": architecture,
            "names": scheme,
            "files": hashes,
            "prefix": prefix,
            "dropped": dropped,
            "others": others,
            "licence": published.licence or facts.licence or None,
        },
        "check": network.picture_features().tolist(),
    }
    card = result_file.jsonable(card)
    return writer.write_folder(epath.Path(out), packed, card, force)


def _make_section(tensors, scheme, architecture, facts, flags, stem_padding) -> dict:
    """Make the "encoder" section of the card."""
    published, kind = architectures.look_up(architecture), names.SCHEMES[scheme].kind
    if kind != published.kind:
        raise wrappers.RefusedTensors(
            f"it is a {kind}, and --architecture={architecture} is a {published.kind}"
        )
    if flags and kind != "vit":
        raise Refused(f"--{next(iter(flags))}: applies to Vision Transformers only")
    if stem_padding is not None and kind != "resnet":
        raise Refused("--stem-padding: applies to ResNets only")
    if kind == "resnet":
        options = architectures.resnet_section(tensors, stem_padding)
    elif kind == "convnext":
        options = architectures.convnext_section(tensors, scheme)
    else:
        options = architectures.vit_section(tensors, scheme, published)
        rotary = options["positions"] == "rotary"
        if rotary != (architecture == "dinov3"):
            table = names.find_tensor(names.SCHEMES[scheme], "positions").tensor
            raise wrappers.RefusedTensors(
                f"it has {'no' if rotary else 'a'} table of positions {table}, and "
                f"--architecture={architecture} has {'one' if rotary else 'none'}"
            )
        width, layers = options["width"], options["layers"]
        heads = published.heads.get((width, layers))
        options["heads"] = find_number(
            "heads", flags, facts, heads, f"{architecture} of {width} x {layers} blocks"
        )
        epsilon = published.epsilon
        if scheme == "transformers" and epsilon is not None:
            epsilon = 1e-12  # of its ViT, whatever it was converted from
        options["epsilon"] = find_number("epsilon", flags, facts, epsilon, architecture)
        if "features" in flags:
            options["features"] = flags["features"]
        # transformers' DINOv2 has SiLU in its gates, whatever config.json says.
        gated = options["mlp"] == "swiglu"
        default = "silu" if gated and scheme != "transformers_dinov2" else "gelu"
        if (activation := facts.network.get("activation", default)) != default:
            raise wrappers.RefusedTensors(
                f"{side_files.CONFIG} next to it says activation={activation!r}, which "
                f"is not supported; must be {default!r}"
            )
    full = schema.defaults(_MAKERS[kind]) | options
    full.pop("dtype")
    try:
        _MAKERS[kind](**full)
    except ValueError as error:
        raise wrappers.RefusedTensors(f"its network cannot be made: {error}") from error
    return {"name": kind, **full, "precision": "float32"}


def find_number(name, flags, facts, published, network) -> Any:
    """Find a number that the tensors lack, from option, config.json or architecture.

    Args:
      name: name of the option, "heads" or "epsilon".
      flags: option -> value.
      facts: values in the files beside the weights.
      published: the architecture's number, or None.
      network: name of the network, for messages.

    Raises:
      wrappers.RefusedTensors: no source has the number, or config.json contradicts the
        architecture and no option decides.
    """
    stated = facts.network.get(name)
    if name in flags:
        option = schema.option_of(vit.vit)[name]
        schema.check_value(flags[name], option.annotation, f"--{name}")
        return flags[name]
    if stated is None and published is None:
        raise wrappers.RefusedTensors(
            f"neither a tensor nor {side_files.CONFIG} shows {name}, and no "
            f"{network} is published; give --{name}"
        )
    if None not in (stated, published) and stated != published:
        raise wrappers.RefusedTensors(
            f"{side_files.CONFIG} next to it says {name}={stated}, but a published "
            f"{network} has {published}; choose by --{name}"
        )
    return published if stated is None else stated


def _find_sizes(section, prepared, size, resize) -> dict:
    """Find the sizes to which images are resized and cut."""
    size = _option_or_prepared(prepared, "size", size)
    if resize is None:
        resize = prepared["resize"] if size == prepared.get("size") else size
    schema.check_value(size, schema.Pixels, "--size")
    schema.check_value(resize, schema.Pixels, "--resize")
    if resize < size:
        raise Refused(f"--resize={resize}: must be at least --size={size}")
    patch = section.get("patch", 1)
    if section["name"] == "vit" and (size % patch or size < patch):
        raise Refused(f"--size={size}: must be a multiple of its patches of {patch}")
    if section["name"] == "convnext":
        least = patch * 2 ** (len(section["depths"]) - 1)
        if size < least:
            raise Refused(f"--size={size}: must be {least} or more for its stages")
    interpolation = prepared.get("interpolation", "bicubic")
    return {"size": size, "resize": resize, "interpolation": interpolation}


def _find_moments(prepared, channels, mean, std) -> dict:
    """Find mean and standard deviation of pixels from 0 to 1, one for each channel."""
    moments = {}
    for name, option in (("mean", mean), ("std", std)):
        value = _option_or_prepared(prepared, name, option)
        if len(value) not in (1, channels):
            raise Refused(f"--{name}", value, f"must be 1 or {channels} numbers")
        kind = schema.Share if name == "mean" else schema.Positive
        for number in value:
            schema.check_value(number, kind, f"--{name}")
        moments[name] = [*value] * (channels if len(value) == 1 else 1)
    return moments


def _option_or_prepared(prepared, name, value) -> Any:
    """Return the option's value, else the files' or the architecture's."""
    value = prepared.get(name) if value is None else value
    if value is None:
        raise Refused(
            f"--{name}: the preparation of its images is unknown; give --size, --mean "
            "and --std, or a narrower --architecture, as 'augreg' or 'deit'"
        )
    return value


def summarise_card(card: dict) -> str:
    """Summarise an imported encoder's card in a few lines."""
    section, imported = card["encoder"], card["imported"]
    lines = [
        f"{section['name']} by the names of {imported['names']}, "
        f"{card['parameters']:,} parameters, {card['num_features']} features"
    ]
    if section["name"] == "vit":
        lines.append(
            f"no tensor shows: heads={section['heads']} epsilon={section['epsilon']}; "
            f"positions={section['positions']} are resized by {section['resize']!r}"
        )
    images = card["input"]
    settings = {name: images[name] for name in ("size", "resize", "mean", "std")}
    lines.append(f"images: {settings}, {images['interpolation']}")
    if images["resize"] > images["size"]:
        lines.append(
            f"embed resizes the shorter side to {images['resize']} and cuts out the "
            f"middle {images['size']} x {images['size']} pixels; for images of "
            f"{images['size']} pixels give --resize={images['size']}"
        )
    dropped = imported["dropped"]
    dropped = [n for n in dropped if not n.endswith(architectures.COUNTERS)]
    if dropped:
        more = f" and {len(dropped) - 8} more" if len(dropped) > 8 else ""
        lines.append(f"left out: {', '.join(dropped[:8])}{more}")
    if imported["licence"]:
        lines.append(f"licence of these weights: {imported['licence']}")
    return "\n".join(lines)


def _read_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be numbers with commas between"
        ) from error


def add_options(parser) -> None:
    """Add the options of `jaxcl import`."""
    add = parser.add_argument
    add("--from", dest="source", required=True, help="a file of weights")
    architecture_names = ", ".join(architectures.ARCHITECTURES)
    add(
        "--architecture",
        required=True,
        help=f"one of {architecture_names}; or a published name, as "
        "vit_tiny_patch16_224",
    )
    add("--out", required=True, help="folder, new or of the same weights")
    add("--prefix", help="of the network's names, if the file has several")
    add("--heads", type=int, help="attention heads; not in the weights")
    add("--epsilon", type=float, help="of the norms; not in the weights")
    add("--features", choices=("class", "mean", "both"), help="of a ViT")
    add("--stem-padding", type=int, help="of a ResNet's 3 x 3 stem")
    add("--size", type=int, help="pixels of a side, for the network")
    add("--resize", type=int, help="shorter side before the centre crop")
    add("--mean", type=_read_numbers, help="of pixels in 0 to 1: 0.5,0.5,0.5")
    add("--std", type=_read_numbers, help="standard deviation, likewise")
    add("--force", action="store_true", help="replace another encoder")


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl import`."""
    card = import_file(**vars(options))
    print(f"{summarise_card(card)}\njaxcl.load_encoder({options.out!r})")
    return 0
