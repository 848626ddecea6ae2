"""Rename the tensors of a known network at random: the same features, or refused."""

import functools
import json
import pathlib
import tempfile

import numpy as np

from attack import kind
from helpers import foreign_weights
from jaxcl.weights import import_file, names, wrappers

PREFIXES = ("backbone.", "model.encoder.", "state_dict.model.", "teacher.", "0.")
# Of networks beside the one that is imported.
OTHERS = ("queue", "optimizer.state", "head.mlp.0.weight", "epoch", "g.0.weight")


@functools.cache
def reference(family: str) -> tuple:
    """The features of the plain file, for the fixed picture, and its network."""
    with tempfile.TemporaryDirectory() as folder:
        return imported(pathlib.Path(folder), family, foreign_weights.make(family)[0])


def imported(folder, family, tensors, **options) -> tuple:
    """Import a file; return features and the network of its card."""
    source = foreign_weights.write(folder / "model.safetensors", tensors)
    known = foreign_weights.FAMILIES[family]
    card = import_file.import_file(
        source, known.architecture, str(folder / "out"), **(known.given | options)
    )
    return card["check"], card["encoder"], card["input"]


# Changes that leave the network what it is: (random numbers, tensors) -> tensors.


def wrap(rng, tensors):
    """Wrappers before any part of a name, the same for all that lies in it."""
    chosen: dict[str, list] = {}

    def wrapped(name):
        parts, made = name.split("."), []
        for i, part in enumerate(parts):
            place = ".".join(parts[:i])
            if place not in chosen:
                count = int(rng.integers(1, 3)) if rng.random() < 0.15 else 0
                chosen[place] = [*rng.choice(wrappers.WRAPPERS, count)]
            made += [*chosen[place], part]
        return ".".join(made)

    return {wrapped(name): x for name, x in tensors.items()}


def chunk(rng, tensors):
    """Blocks in chunks, counted through or anew in each."""
    size, through = int(rng.integers(1, 3)), rng.random() < 0.5

    def chunked(name):
        first, _, rest = name.partition(".")
        if first != "blocks":
            return name
        number, _, rest = rest.partition(".")
        inner = int(number) if through else int(number) % size
        return f"blocks.{int(number) // size}.{inner}.{rest}"

    return {chunked(name): x for name, x in tensors.items()}


def number(rng, tensors):
    """The layers of torchvision's ResNet as an `nn.Sequential` has them."""
    pooled = tensors["conv1.weight"].shape[-1] == 7
    order = ["conv1", "bn1", "relu", *["maxpool"] * pooled]
    order += ["layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]

    def numbered(name):
        first, _, rest = name.partition(".")
        return f"{order.index(first)}.{rest}"

    return {numbered(name): x for name, x in tensors.items()}


def convert(rng, tensors):
    """Another type that loses nothing, and counters as PyTorch has them."""
    double = {name: x.astype("f8") for name, x in tensors.items()}
    counters = {
        name.replace("running_var", "num_batches_tracked"): np.zeros((), "i8")
        for name in tensors
        if name.endswith("running_var")
    }
    return double | counters


# Changes that the import must notice: -> tensors, and what a refusal has to name.


def shown(tensors) -> list[str]:
    """Tensors that others need; how many registers there were, none shows."""
    free = ("reg_token", "register_tokens", "storage_tokens", "mask_token")
    return [name for name in tensors if not name.endswith(free)]


def lose(rng, tensors):
    """A tensor is missing."""
    name = str(rng.choice(shown(tensors)))
    rest = {key: x for key, x in tensors.items() if key != name}
    return rest, [name.rpartition(".")[0] or name, *_siblings(name, rest)]


def misspell(rng, tensors):
    name = str(rng.choice([*tensors]))
    parts = name.split(".")
    parts[int(rng.integers(len(parts)))] += "x"
    new = {".".join(parts) if key == name else key: x for key, x in tensors.items()}
    return new, [name, ".".join(parts), *_siblings(name, tensors)]


def cut(rng, tensors):
    """A tensor has another shape, in which nothing fits the others."""
    name = str(rng.choice(shown(tensors)))
    axis = int(rng.integers(tensors[name].ndim))
    size = tensors[name].shape[axis]
    other = np.take(tensors[name], [*range(size - 1)] or [0, 0], axis)
    return tensors | {name: other}, [*tensors, "must be", "no first convolution"]


def repeat(rng, tensors):
    name = str(rng.choice([*tensors]))
    return tensors | {f"module.{name}": tensors[name]}, [name]


def _siblings(name, tensors):
    """Names that tell the same of other blocks, and beginnings of lost ones."""
    last = name.split(".")[-2:]
    found = [key for key in tensors if key.split(".")[-2:] == last]
    found += [".".join(name.split(".")[:i]) + "." for i in range(1, 4)]
    return [*found, "it holds no"]  # the tensor was what the network is known by


HARM = (lose, misspell, cut, repeat)


def contradict(rng, family, folder) -> list[str]:
    """A config.json beside the file that says another number."""
    options = foreign_weights.FAMILIES[family].options
    keys = {"num_attention_heads": "heads", "num_hidden_layers": "layers"}
    keys |= {"hidden_size": "width", "patch_size": "patch"}
    said = {key: options[name] for key, name in keys.items()}
    wrong = str(rng.choice([*keys]))
    said |= {"model_type": "vit", "layer_norm_eps": 1e-6, wrong: 2 * said[wrong]}
    (folder / "config.json").write_text(json.dumps(said))
    return [keys[wrong], "epsilon"]


def attack(family: str, rng: np.random.Generator, place: kind.Place) -> str:
    """A file of random names is imported: the same features, or it is refused."""
    tensors, _ = foreign_weights.make(family)
    scheme = names.SCHEMES[foreign_weights.scheme_of(family)]
    words, options = [], {}
    harm = HARM[rng.integers(len(HARM))] if rng.random() < 0.4 else None
    if harm:
        tensors, words = harm(rng, tensors)
    elif scheme.kind == "vit" and rng.random() < 0.2:
        words = contradict(rng, family, place.folder)
    changes = [convert, wrap]
    if harm in (None, cut):  # else a name may have no number
        if any(name.startswith("blocks.") for name in tensors):
            changes.insert(0, chunk)
        if scheme.kind == "resnet":
            changes.insert(0, number)
    for change in changes:
        tensors = change(rng, tensors) if rng.random() < 0.6 else tensors
    if rng.random() < 0.6:
        begin = str(rng.choice(PREFIXES))
        tensors = {f"{begin}{name}": x for name, x in tensors.items()}
        for other in rng.choice(OTHERS, 2, replace=False):
            tensors[str(other)] = np.ones(3, "f4")
        if rng.random() < 0.3:
            twice = {f"student.{name}": 2 * x for name, x in tensors.items()}
            tensors |= {n: x for n, x in twice.items() if x.dtype.kind == "f"}
            if rng.random() < 0.7 or words:
                options["prefix"] = begin
            else:
                words = ["--prefix"]
    try:
        found = imported(place.folder, family, tensors, **options)
    except ValueError as error:
        if not words:
            raise kind.Broken(f"{family}: refused: {error}") from error
        if not any(word in str(error) for word in words):
            raise kind.Broken(f"{family}: {words[:3]} not named: {error}") from error
        return f"refused: {harm.__name__ if harm else 'numbers or networks'}"
    if found != reference(family):
        raise kind.Broken(f"{family}: another network, {harm}")
    if words:
        raise kind.Broken(f"{family}: not refused: {words[:3]}")
    return "same features"


def of_any(rng: np.random.Generator, place: kind.Place) -> str:
    """A file of any library."""
    return attack(str(rng.choice([*foreign_weights.FAMILIES])), rng, place)


KINDS = (kind.Kind("weights: any library", of_any, 3),)
