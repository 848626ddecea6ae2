"""A Vision Transformer's parameters under the names that PyTorch libraries give them.

Each library is a `Scheme`: how it calls the parts, and what it keeps in one tensor. A
list of `Leaf` says which part of which tensor each of our arrays is. It is read in both
directions: by `jaxcl.bring` from their names to ours, by `--torch` from ours to timm's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxcl.export import encoder
from jaxcl.nets import positions

TENSORS = "vit_torch.safetensors"


class Scheme(NamedTuple):
    """The names of one library; those of a block follow its prefix."""

    patch: str = "patch_embed.proj"
    first: str = "cls_token"
    registers: str = "reg_token"
    table: str = "pos_embed"
    block: str = "blocks.{}."
    norm1: str = "norm1"
    norm2: str = "norm2"
    qkv: str = "attn.qkv"  # one tensor; "": three, named by `heads`
    heads: str = ""  # with {} for query, key, value, or their first letters
    letters: bool = False
    biases: str = ""  # of queries and values, where they are not beside `qkv`
    out: str = "attn.proj"
    scales: tuple[str, str] = ("ls1.gamma", "ls2.gamma")
    fc: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    gated: str = ""  # gate and up in one tensor; "": two, named by `gate_up`
    gate_up: tuple[str, str] = ("", "")
    down: str = "mlp.fc2"
    norm: str = "norm"
    # Beginnings of names that the features do not depend on.
    dropped: tuple[str, ...] = ("head.", "head_dist.", "pre_logits.", "mask_token")


_HF = "embeddings."
SCHEMES = {
    "timm": Scheme(
        gated="mlp.fc1", dropped=(*Scheme().dropped, "decoder_", "fc_head.")
    ),
    "timm_dinov3": Scheme(
        biases="attn.{}_bias",
        scales=("gamma_1", "gamma_2"),
        gate_up=("mlp.fc1_g", "mlp.fc1_x"),
    ),
    "deit3": Scheme(scales=("gamma_1", "gamma_2")),
    "dinov2": Scheme(registers="register_tokens", gated="mlp.w12", down="mlp.w3"),
    "dinov3": Scheme(
        registers="storage_tokens",
        gate_up=("mlp.w1", "mlp.w2"),
        down="mlp.w3",
        dropped=("head.", "mask_token", "rope_embed.", "local_cls_norm."),
    ),
    "transformers": Scheme(
        patch=_HF + "patch_embeddings.projection",
        first=_HF + "cls_token",
        table=_HF + "position_embeddings",
        block="encoder.layer.{}.",
        norm1="layernorm_before",
        norm2="layernorm_after",
        qkv="",
        heads="attention.attention.{}",
        out="attention.output.dense",
        fc=("intermediate.dense", "output.dense"),
        norm="layernorm",
        dropped=("pooler.", "classifier.", "embeddings.mask_token"),
    ),
    "transformers_dinov2": Scheme(
        patch=_HF + "patch_embeddings.projection",
        first=_HF + "cls_token",
        registers=_HF + "register_tokens",
        table=_HF + "position_embeddings",
        block="encoder.layer.{}.",
        qkv="",
        heads="attention.attention.{}",
        out="attention.output.dense",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        gated="mlp.weights_in",
        down="mlp.weights_out",
        norm="layernorm",
        dropped=("embeddings.mask_token", "classifier."),
    ),
    "transformers_dinov3": Scheme(
        patch=_HF + "patch_embeddings",
        first=_HF + "cls_token",
        registers=_HF + "register_tokens",
        block="layer.{}.",
        qkv="",
        heads="attention.{}_proj",
        letters=True,
        out="attention.o_proj",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        fc=("mlp.up_proj", "mlp.down_proj"),
        gate_up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        dropped=("embeddings.mask_token", "rope_embeddings."),
    ),
}


class Leaf(NamedTuple):
    """One of our arrays, and the part of a tensor that it is."""

    ours: str  # path in the parameters, as "block_0/norm1/scale"
    theirs: str
    # "same"; "dense" [out, in]; "conv" OIHW; of positions [1, 1 + N, D] the "first" row
    # or the "others", or "rows" of [1, N, D]
    kind: str = "same"
    part: tuple[int, int] = (0, 1)  # number i of n equal parts of axis 0


def leaves(scheme: Scheme, section: Mapping[str, Any], layers: int) -> list[Leaf]:
    """All arrays of a network, by the names of a library.

    Args:
      scheme: of the library.
      section: options of `nets.vit.vit`.
      layers: blocks.
    """
    found = [
        Leaf("patch/kernel", f"{scheme.patch}.weight", "conv"),
        Leaf("patch/bias", f"{scheme.patch}.bias"),
        Leaf("class", scheme.first),
    ]
    if section["registers"]:
        found.append(Leaf("registers", scheme.registers))
    if section["positions"] == "learned":
        if section["class_position"]:
            found.append(Leaf("class_position", scheme.table, "first"))
            found.append(Leaf("positions", scheme.table, "others"))
        else:
            found.append(Leaf("positions", scheme.table, "rows"))
    for number in range(layers):
        begin = scheme.block.format(number)
        for leaf in _block(scheme, section):
            ours = f"block_{number}/{leaf.ours}"
            found.append(leaf._replace(ours=ours, theirs=begin + leaf.theirs))
    return [*found, *_norm("norm", scheme.norm)]


def _norm(ours, theirs):
    yield Leaf(f"{ours}/scale", f"{theirs}.weight")
    yield Leaf(f"{ours}/bias", f"{theirs}.bias")


def _dense(ours, theirs, part=(0, 1)):
    yield Leaf(f"{ours}/kernel", f"{theirs}.weight", "dense", part)
    yield Leaf(f"{ours}/bias", f"{theirs}.bias", "same", part)


def _block(scheme, section):
    """The arrays of a block, without its prefix."""
    yield from _norm("norm1", scheme.norm1)
    yield from _heads(scheme, section["qkv_bias"])
    yield from _dense("attention/out", scheme.out)
    yield from _norm("norm2", scheme.norm2)
    if section["layer_scale"] is not None:
        yield Leaf("scale1", scheme.scales[0])
        yield Leaf("scale2", scheme.scales[1])
    if section["mlp"] == "gelu":
        yield from _dense("mlp/fc1", scheme.fc[0])
        yield from _dense("mlp/fc2", scheme.fc[1])
        return
    for number, name in enumerate(("gate", "up")):
        if scheme.gated:
            yield from _dense(f"mlp/{name}", scheme.gated, (number, 2))
        else:
            yield from _dense(f"mlp/{name}", scheme.gate_up[number])
    yield from _dense("mlp/down", scheme.down)


def _heads(scheme, biased):
    """Queries, keys and values."""
    for number, name in enumerate(("query", "key", "value")):
        ours, part = f"attention/{name}", (number, 3) if scheme.qkv else (0, 1)
        own = scheme.heads.format(name[0] if scheme.letters else name)
        kernel, bias = _dense(ours, scheme.qkv or own, part)
        yield kernel
        if biased == "none" or (biased == "query_value" and name == "key"):
            continue
        if scheme.biases:
            bias = Leaf(bias.ours, scheme.biases.format(name[0]))
        yield bias


def ours_of(leaf: Leaf, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Our array of a tensor.

    Raises:
      ValueError: it has another shape, `shape`.
    """
    number, count = leaf.part
    rows = np.asarray(tensor)
    fits = rows.ndim > 0 and len(rows) % count == 0
    rows = np.split(rows, count)[number] if fits else rows
    if leaf.kind == "dense":
        # A convolution of 1 x 1 is a dense layer, too.
        rows = rows[:, :, 0, 0] if rows.shape[2:] == (1, 1) else rows
        rows = rows.T
    elif leaf.kind == "conv" and rows.ndim == 4:
        rows = rows.transpose(2, 3, 1, 0)
    elif leaf.kind == "first" and rows.ndim == 3:
        rows = rows[0, 0]
    elif leaf.kind in ("others", "rows") and rows.ndim == 3:
        rows = rows[0, int(leaf.kind == "others") :].reshape(-1)
        rows = rows.reshape(shape) if rows.size == np.prod(shape) else rows
    elif leaf.kind == "same":  # tokens and factors may have axes of 1 around them
        while rows.ndim > len(shape) and len(rows) == 1:
            rows = rows[0]
        while rows.ndim > len(shape) and rows.shape[-1] == 1:
            rows = rows[..., 0]
    if not fits or rows.shape != shape:
        raise ValueError(
            f"{leaf.theirs} has the shape {list(np.shape(tensor))}, which does not "
            f"make {leaf.ours} of the shape {list(shape)}"
        )
    return np.ascontiguousarray(rows)


def theirs_of(found: list[Leaf], arrays: Mapping[str, np.ndarray]) -> dict:
    """Tensors by a library's names, of all our arrays; the reverse of `ours_of`."""
    parts: dict[str, list[np.ndarray]] = {}
    for leaf in found:
        x = np.asarray(arrays[leaf.ours])
        if leaf.kind == "dense":
            x = x.T
        elif leaf.kind == "conv":
            x = x.transpose(3, 2, 0, 1)
        elif leaf.kind in ("first", "others", "rows"):
            x = x.reshape(-1, x.shape[-1])
        parts.setdefault(leaf.theirs, []).append(x)
    joined = {
        name: np.concatenate(x) if len(x) > 1 else x[0] for name, x in parts.items()
    }
    tables = {leaf.theirs for leaf in found if leaf.kind in ("first", "rows")}
    tokens = {leaf.theirs for leaf in found if leaf.ours in ("class", "registers")}
    for name in tables | tokens:
        joined[name] = joined[name].reshape(1, -1, joined[name].shape[-1])
    return {name: np.ascontiguousarray(x) for name, x in joined.items()}


def check(section: dict) -> None:
    """Refuse what timm has no network for.

    Raises:
      ValueError: naming the field.
    """
    if section["positions"] == "rotary" and section["qkv_bias"] == "all":
        raise ValueError(
            "--torch: config.encoder.qkv_bias='all' with positions='rotary' cannot be "
            "exported to timm, whose keys have no bias there; must be 'query_value' or "
            "'none'"
        )


def _written(section) -> tuple[Scheme, dict]:
    """The scheme of timm that a network is written in, and its section there.

    Timm's networks with registers, and those with fixed positions, add no position to
    the class token: it is part of the token. Its one tensor of queries, keys and values
    has a bias of all or of none.
    """
    rotary = section["positions"] == "rotary"
    plain = section["positions"] == "learned" and not section["registers"]
    table = {} if rotary else {"positions": "learned"}
    alone = {"class_position": plain and section["class_position"]}
    partly = not rotary and section["qkv_bias"] == "query_value"
    biases = {"qkv_bias": "all"} if partly else {}
    scheme = SCHEMES["timm_dinov3" if rotary else "timm"]
    return scheme, {**section, **table, **alone, **biases}


def _layers(names) -> int:
    return len({name.split("/")[0] for name in names if name.startswith("block_")})


def key_map(names, section: dict) -> dict[str, str]:
    """Timm's name of each tensor -> our names in the exported file.

    Args:
      names: our names, as "params/block_0/norm1/scale".
      section: "encoder" of a card.
    """
    ours = {name.partition("/")[2] for name in names}
    scheme, written = _written(section)
    found: dict[str, list[str]] = {}
    for leaf in leaves(scheme, written, _layers(ours)):
        own = [leaf.ours] if leaf.ours in ours else []
        found.setdefault(leaf.theirs, []).extend(f"params/{name}" for name in own)
    if "class_position" in ours and not written["class_position"]:
        found[scheme.first].append("params/class_position")
    return {theirs: ", ".join(own) for theirs, own in found.items()}


def torch_state(source: Any) -> dict[str, np.ndarray]:
    """The state dict of timm's Vision Transformer without a head, as NumPy arrays.

    That is `timm.models.vision_transformer.VisionTransformer` for images of the card's
    size; with rotary positions `timm.models.eva.Eva`.

    Args:
      source: a `jaxcl.export.encoder.Encoder`, or the folder of one.

    Raises:
      ValueError: timm has no such network; the folder cannot be read.
    """
    network = source
    if not isinstance(source, encoder.Encoder):
        network = encoder.load_encoder(source)
    section = network.card["encoder"]
    check(section)
    flat = encoder.flat(network.params, network.stats)
    arrays = {name.partition("/")[2]: leaf for name, leaf in flat.items()}
    scheme, written = _written(section)
    if "class_position" in arrays and not written["class_position"]:
        arrays["class"] = arrays["class"] + arrays.pop("class_position")
    side = network.card["input"]["size"] // section["patch"]
    if section["positions"] == "sin_cos":
        arrays["positions"] = positions.sin_cos((side, side), len(arrays["class"]))
    elif section["positions"] == "learned":  # timm resizes by one rule, we by several
        table = positions.resized(arrays["positions"], (side, side), section["resize"])
        arrays["positions"] = np.asarray(table)
    found = leaves(scheme, written, _layers(arrays))
    for leaf in found:
        if leaf.ours.endswith("attention/key/bias"):  # where keys have none
            arrays.setdefault(leaf.ours, np.zeros_like(arrays["class"]))
    return theirs_of(found, arrays)
