"""Read the sections of a config: data, networks, optimisers, methods.

Each names a function and gives its keyword arguments, so the signatures are the
schema: a key that a function does not take, or a value of another type than its
default, is an error before anything is read. Only `build` calls these.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, lookup, optim, schema, sharding
from jaxcl.data import stream
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.augment import images as augment_images
from jaxcl.data.images import crops
from jaxcl.data.sources import by_name
from jaxcl.data.stream import imbalance, scenarios
from jaxcl.errors import Refused
from jaxcl.methods.online import replay
from jaxcl.nets import convnext, gcn, gin, mlp, pieces, resnet, traits, tuning, vit
from jaxcl.run import encoder_folder, transfer

PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
GRAPH_ENCODERS = {"gcn": gcn.gcn, "gin": gin.gin}
ENCODERS = {
    "resnet": resnet.resnet,
    "conv_net": resnet.conv_net,
    "vit": vit.vit,
    "convnext": convnext.convnext,
    "mlp": mlp.perceptron,
    **GRAPH_ENCODERS,
}
OPTIMIZERS = {"sgd": optim.sgd, "lars": optim.lars, "adam": optim.adam}
SCHEDULES = {
    "warmup_cosine": optim.warmup_cosine,
    "cosine": optim.cosine,
    "constant": optim.constant,
    "step_decay": optim.step_decay,
    "ramped_cosine": optim.ramped_cosine,
}
# A run directory is named by it.
_Name = Annotated[
    str, schema.Text(r"(?!\.{1,2}$)[^/\\\0]+", "a name without a path: no / and no \\")
]
_Epochs = schema.Count | Annotated[tuple[schema.Count, ...], schema.Entries()]
_Bytes = Annotated[int, schema.Range(0, 2**63 - 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopLevel:
    """The top level of a config; sections are dicts."""

    data: dict  # name of a source, and its options
    scenario: dict  # name, and options of scenarios.make
    # options of augment.images.make, `resize` for evaluation and a section `local`,
    # options of augment.images.make_local_crops; or name="graphs" and those of
    # augment.graphs.make
    augment: dict
    encoder: dict  # name, and its options
    method: dict  # name, and options of its make
    optimizer: dict  # name, lr, and its options
    schedule: dict  # name, and its options
    evaluators: dict  # name -> options of its make
    replay: dict | None = None  # options of methods.online.replay.settings
    # Options of nets.tuning.settings, or a name in its RECIPES; None: all trains
    tuning: dict | Literal["decay", "lora", "explora"] | None = None
    name: _Name = "run"  # of the run; its default directory is runs/NAME
    regime: str = ""  # a word that other values of the config follow
    seed: schema.Natural = 0  # of all random draws; the first one with `seeds`
    seeds: schema.Count = 1  # number of runs, with consecutive seeds
    batch_size: schema.Count = 256  # images in a step, over all devices
    # Pieces of a batch that pass the encoder in turn: less memory, a third more time
    accumulate: schema.Count = 1
    # Epochs of each task; in a list the last number serves all later tasks
    epochs: _Epochs = 1
    # A task ends after so many epochs without a lower loss; 0: never
    patience: schema.Natural = 0
    # Of the computation; parameters stay float32. "auto": bfloat16 on TPUs and recent
    # GPUs
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    scale_lr: bool = True  # multiply optimizer.lr by batch_size / 256
    devices: schema.Count | None = None  # number of devices; None: all
    # Options of `read_sides`; None: each device has all weights
    mesh: dict | None = None
    # Steps of one call. "task": all up to the next save, evaluation or end of a task.
    # None: 1 on CPU; elsewhere "task" for methods that replay, 8 for others
    steps_per_call: schema.Count | Literal["task"] | None = None
    # Folder of compiled programs for later runs, unless JAX has one already.
    # "auto": in this user's cache folder; "": none
    compile_cache: str = "auto"
    device_bytes: _Bytes = 8 * 2**30  # sets up to this size live on the device
    duplicates: bool | None = None  # count duplicate images; None: if that is quick
    # Threads that decode images; 0: one for each core, 32 at most
    workers: Annotated[int, schema.Range(0, 1024)] = 0
    log_every: schema.Count = 10  # steps between logged rows
    save_every: schema.Natural = 500  # steps between saves; 0: after tasks only
    eval_every: schema.Natural = 0  # steps between evaluations; 0: after tasks only
    eval_epochs: schema.Natural = 0  # epochs between evaluations; 0: after tasks only
    # Checkpoints to keep; the second newest serves if the newest is damaged
    keep: Annotated[int, schema.Range(least=2)] = 2
    evaluate_untrained: bool = True  # evaluate before the first step, too
    plasticity: bool = True  # also train on each task alone, for FT_i
    plasticity_from: str | None = None  # a run of the same base that measured FT_i
    # A run to continue with further tasks, or the folder of an encoder to begin with
    start: str | None = None
    # The folder of an encoder that strategy "distil" learns from
    teacher: str | None = None
    first_tasks: schema.Count | None = None  # train only so many tasks; None: all
    checkpoint: str | None = None  # evaluate the encoder of this run; train nothing
    tensorboard: bool = True  # write TensorBoard events
    loggers: str = ""  # modules of run.loggers, or your own, with commas
    plots: bool = True  # draw pictures
    # Show a progress bar; "auto": only on a terminal or in a notebook
    progress: Literal["auto"] | bool = "auto"


def choose_precision(raw: dict) -> str:
    """Choose the precision for "auto": "bfloat16", or float32 on CPUs and for graphs.

    GPUs before compute capability 8 (Ampere) have no arithmetic in it, either.
    """
    if raw.get("augment", {}).get("name") == "graphs":
        return "float32"
    return "bfloat16" if sharding.multiplies_bfloat16() else "float32"


def read_top(raw: dict) -> TopLevel:
    """Check the top level of a config that `resolve.resolve` returned."""
    judges = raw.get("checkpoint") is not None
    unused = dict.fromkeys(transfer.TRAINING, {}) if judges else {}
    top = TopLevel(**schema.options(TopLevel, unused | raw, "config"))
    for key, section in top.evaluators.items():
        schema.check_value(section, dict, f"config.evaluators.{key}")
    return top


class ImageSettings(NamedTuple):
    """Settings by which evaluators and loaders prepare images for the encoder."""

    size: int  # pixels of a side
    mean: tuple[float, ...]  # of each channel, in [0, 1]
    std: tuple[float, ...]
    resize: int | None = None  # shorter side before the centre crop; None: no crop
    views: int = 1  # crops of each image that streams
    crop: crops.RandomCrop | None = None  # of images that stream


class _Views(NamedTuple):
    """The functions of `core.Parts` that make the encoder's input."""

    augment: Callable
    image: ImageSettings
    plain: Callable | None = None
    local: Callable | None = None


def check_image(
    *,
    size: schema.Pixels,
    resize: schema.Pixels | None = None,
    mean: augment_images.Mean,
    std: augment_images.Std,
) -> ImageSettings:
    """Check the augment section of a transfer run, which makes no views."""
    return ImageSettings(size, tuple(mean), tuple(std), resize)


def check_graphs(top: TopLevel, train: stream.Examples | None = None) -> None:
    """Refuse a config that mixes sections for graphs and for images.

    Args:
      train: the examples, once they are read.
    """
    names = {x: getattr(top, x).get("name") for x in ("augment", "encoder", "data")}
    flags = {
        "augment": names["augment"] == "graphs",
        "encoder": names["encoder"] in GRAPH_ENCODERS,
    }
    if train is not None:
        flags["data"] = train.graphs is not None
    for_graphs, for_images = (
        [f"config.{x}.name={names[x]!r}" for x in flags if flags[x] is graphs]
        for graphs in (True, False)
    )
    if for_graphs and for_images:
        raise Refused(
            f"{', '.join(for_images)}: must be for graphs, as {', '.join(for_graphs)} "
            "is: a set of graphs needs config.augment.name='graphs' and "
            f"config.encoder.name={' or '.join(map(repr, GRAPH_ENCODERS))}"
        )


class Section(NamedTuple):
    """The rule of a section: the function that has its options, and further options."""

    # (path of the section, section) -> function, or several
    find: Callable[[str, Mapping], Any]
    # name -> (default, meaning) of options that the function does not take
    beside: Mapping[str, tuple[Any, str]] = {}
    hidden: tuple[str, ...] = ()  # parameters of the function that no config sets
    # (function, section) -> name -> rule of a section inside it
    inner: Callable[[Any, Mapping], dict] = lambda function, section: {}

    def read(self, path: str, section: Mapping, **how) -> tuple[Any, dict, dict]:
        """Check a section.

        Args:
          path: path of the section, for messages ("config.encoder").
          section: ConfigDict or dict.
          how: other arguments of `schema.options`.

        Returns:
          its function, the function's options that are set, and the options beside.
        """
        function = self.find(path, section)
        extra = {name: section.get(name, x) for name, (x, _) in self.beside.items()}
        options = {name: x for name, x in section.items() if name not in extra}
        options = schema.options(function, options, path, excluded=self.hidden, **how)
        return function, options, extra


_NAMED = {"name": (schema.MISSING, "one of those that `jaxcl list` prints")}


def _find_in(functions: Mapping[str, Callable]) -> Callable:
    """Return the `find` of a section whose name picks one of these functions."""
    return lambda path, section: lookup.find_function(functions, section, path)[0]


def _find_augment(path, section):
    name = section.get("name", "images")
    core.check_choice(f"{path}.name", name, ("images", "graphs"))
    return augment_graphs.make if name == "graphs" else augment_images.make


def _find_evaluator(path, section):
    kind = section.get("name", path.rpartition(".")[2])
    return lookup.find_module("jaxcl.evals", kind, f"{path}.name").make


def _list_choices(make, section) -> dict:
    """List the sections inside config.method, see `schema.Choice`."""

    def find_by(rule):
        return lambda path, section: rule.find(section, path)[0]

    rules = schema.choices(make).items()
    return {name: Section(find_by(rule), _NAMED) for name, rule in rules}


def _list_sources(function, section) -> dict:
    """List the sources inside a source; those of a list each by its number."""
    entries = []
    for name, value in section.items():
        many = isinstance(value, list | tuple)
        entries += [(f"{name}.{i}", x) for i, x in enumerate(value)] if many else []
        entries += [] if many else [(name, value)]
    return {
        name: SECTIONS["data"]
        for name, value in entries
        if isinstance(value, Mapping) and "name" in value
    }


LOCAL_CROPS = Section(lambda path, section: augment_images.make_local_crops)
# The sections of the top level, in the order of `TopLevel`
SECTIONS: dict[str, Section] = {
    "data": Section(_find_in(by_name.SOURCES), _NAMED, inner=_list_sources),
    "scenario": Section(
        lambda path, section: scenarios.find_functions(section.get("name"))
    ),
    "augment": Section(
        _find_augment,
        {
            "name": ("images", '"images" or "graphs"'),
            "resize": (None, "shorter side before the centre crop, for evaluation"),
        },
        hidden=("dtype",),
        inner=lambda function, section: (
            {"local": LOCAL_CROPS} if section.get("local") is not None else {}
        ),
    ),
    "encoder": Section(_find_in(ENCODERS), _NAMED, hidden=("dtype",)),
    "method": Section(
        lambda path, section: lookup.find_method(section.get("name")).make,
        _NAMED,
        inner=_list_choices,
    ),
    "optimizer": Section(
        _find_in(OPTIMIZERS),
        {
            **_NAMED,
            "lr": (schema.MISSING, "learning rate at its peak, see config.scale_lr"),
        },
    ),
    "schedule": Section(_find_in(SCHEDULES), _NAMED, hidden=("epochs",)),
    "evaluators": Section(lambda path, section: ()),  # one of EVALUATOR for each key
    "replay": Section(lambda path, section: replay.settings),
    "tuning": Section(lambda path, section: tuning.settings),
    "mesh": Section(lambda path, section: read_sides),
}
EVALUATOR = Section(
    _find_evaluator,
    {
        "name": (schema.MISSING, "of the evaluator, if it is not the key"),
        "last_only": (False, "run after the last task only"),
        "skip": (False, "never run"),
    },
    hidden=("directory",),
)


def read_tasks(data, scenario, seed=0, stand_in=None):
    """Check the options of data and scenario; the data are read later.

    Args:
      data, scenario: sections of a config.
      seed: the run's, see `scenarios.run_seed`.
      stand_in: a dataset in place of what would be read.

    Returns:
      () -> stream.Stream, which reads the data and cuts the tasks.

    Raises:
      Refused: naming field, value and range.
    """
    source, data_options, _ = SECTIONS["data"].read("config.data", data)
    scenario = scenarios.run_seed(scenario, seed) | scenario
    _, cut, _ = SECTIONS["scenario"].read(
        "config.scenario", scenario, others=scenarios.list_functions()
    )
    uneven = cut.get("imbalance"), cut.get("long_tail")
    imbalance.check_options(*uneven, field="config.scenario.")
    return lambda: scenarios.make(stand_in or source(**data_options), **cut)


def read_parts(top: TopLevel) -> tuple[Callable[..., core.Parts], ImageSettings]:
    """Read the sections of `core.Parts`, before there are data.

    Returns:
      A function from facts about the data to Parts, and the images' settings.

    Raises:
      Refused: an option of augment, encoder, tuning, optimizer or schedule is wrong.
    """
    views = _build_views(top)
    optimize, optimizer, extra = SECTIONS["optimizer"].read(
        "config.optimizer", top.optimizer
    )
    lr = None if extra["lr"] is schema.MISSING else extra["lr"]
    schema.check_value(lr, schema.Positive, "config.optimizer.lr")
    curve, schedule, _ = SECTIONS["schedule"].read("config.schedule", top.schedule)
    peak = lr * (top.batch_size / 256 if top.scale_lr else 1.0)
    if top.scale_lr:
        field = f"config.optimizer.lr={lr!r} x config.batch_size={top.batch_size} / 256"
        schema.check_value(peak, schema.Positive, field)
    has_epochs = "epochs" in inspect.signature(curve).parameters

    def rate_with_peak(peak):
        if not has_epochs:
            return optim.by_task([curve(peak, **schedule)])
        epochs = stream.epochs_of_tasks(top.epochs)
        return optim.by_task([curve(peak, epochs=n, **schedule) for n in epochs])

    module = make_encoder(top)
    tx = optimize(**optimizer)
    # An update of the run reads no folder, and has the same optimizer state.
    if isinstance(module, tuning.TunedEncoder) and not module.trains_whole:
        tx = optim.by_leaf(
            tx, lambda x: module.rate_share(x[1:]) if x[0] == "encoder" else 1.0
        )
    if top.accumulate > 1:
        module = _split_batches(top, module)
    make_parts = functools.partial(
        core.Parts,
        encoder=module,
        augment=views.augment,
        eval_transform=views.plain,
        local=views.local,
        tx=tx,
        lr=rate_with_peak(peak),
        schedule_with_peak=rate_with_peak,
    )
    return make_parts, views.image


def make_mesh(top: TopLevel):
    """Make the devices' mesh, of config.devices or of config.mesh.

    Raises:
      Refused: an option is wrong, both are given, or there are fewer devices; the
        weights of the encoder cannot be split.
    """
    if top.mesh is None:
        return sharding.mesh(top.devices)
    _, options, _ = SECTIONS["mesh"].read("config.mesh", top.mesh)
    if top.devices is not None:
        raise Refused(
            f"config.devices={top.devices}: config.mesh says how many; must be None"
        )
    data, model = read_sides(**options)
    if model > 1:
        _check_split(top, model)
    return sharding.mesh(data * model, model=model)


def _check_split(top: TopLevel, model: int) -> None:
    """Refuse an encoder whose weights so many devices cannot share."""
    net = _module(top)
    if not isinstance(net, vit.ViT):
        raise Refused(
            f"config.mesh: model={model} splits weights of config.encoder.name='vit' "
            f"alone; must be 1 for {top.encoder['name']!r}"
        )
    for name, count in (("heads", net.heads), ("hidden", net.hidden)):
        if count % model:
            raise Refused(
                f"config.mesh: model={model}: must divide {name}={count} of "
                "config.encoder"
            )


def read_sides(*, data: schema.Count, model: schema.Count = 1) -> tuple[int, int]:
    """Read config.mesh: the parts of a batch, and the devices that share weights.

    Args:
      data: parts of a batch.
      model: devices that share the weights of a Vision Transformer.
    """
    return data, model


def _split_batches(top: TopLevel, module):
    """Make the encoder pass its batches in the pieces of config.accumulate."""
    if top.augment.get("name") == "graphs":
        raise Refused(
            f"config.accumulate={top.accumulate}: batches of graphs are not cut; must "
            "be 1"
        )
    if top.batch_size % top.accumulate:
        raise Refused(
            f"config.accumulate={top.accumulate}: must divide config.batch_size="
            f"{top.batch_size}"
        )
    return pieces.PiecewiseEncoder(module, top.accumulate)


def _build_views(top: TopLevel) -> _Views:
    """Make the views that a config asks for, of images or of graphs."""
    path, rule = "config.augment", SECTIONS["augment"]
    if top.augment.get("name") == "graphs":
        unmixed = {name: x for name, x in top.augment.items() if name != "name"}
        augment = schema.options(augment_graphs.make, unmixed, path)
        # Evaluators ask for these; graphs have no pixels, so the values mean nothing.
        return _Views(augment_graphs.make(**augment), ImageSettings(1, (0.0,), (1.0,)))
    local = top.augment.get("local")
    if local is not None:
        schema.check_value(local, dict, f"{path}.local")
    section = {name: x for name, x in top.augment.items() if name != "local"}
    _, augment, extra = rule.read(path, section)
    augment = augment | {"dtype": PRECISIONS[top.precision]}
    full = schema.defaults(augment_images.make) | augment
    view = augment_images.make(**augment)
    plain = augment_images.make_eval(
        size=full["size"],
        resize=extra["resize"],
        mean=full["mean"],
        std=full["std"],
        dtype=full["dtype"],
    )
    crop_locally = None
    if local is not None:
        make, options, _ = LOCAL_CROPS.read(f"{path}.local", local)
        crop_locally = make(augment, **options)
    crop = crops.RandomCrop(
        size=full["size"],
        scale=tuple(full["scale"]),
        ratio=tuple(full["ratio"]),
        interpolation=full["interpolation"],
    )
    image = ImageSettings(
        size=full["size"],
        mean=tuple(full["mean"]),
        std=tuple(full["std"]),
        resize=extra["resize"],
        views=full["views"],
        crop=crop,
    )
    return _Views(view, image, plain, crop_locally)


def make_encoder(top: TopLevel):
    """Make the module of config.encoder.

    Raises:
      Refused: an option is wrong; the folder of config.start is damaged, or of
        another network; running statistics are to stay, and there are none.
    """
    module, weights = _module(top), None
    if encoder_folder.exists_at(top.start):
        card = encoder_folder.read_card(top.start)
        size, channels = (card["input"][name] for name in ("size", "channels"))
        blank = np.zeros((1, size, size, channels), np.float32)
        leaves = encoder_folder.read_leaves(top.start, card)
        trees = encoder_folder.fill_trees(module, blank, leaves, top.start)
        weights = functools.partial(
            tuple, jax.tree.map(np.asarray, trees)
        )  # on the host
    encoder = wrap_tuned(module, top.tuning, weights)
    chosen = encoder.chosen if isinstance(encoder, tuning.TunedEncoder) else None
    trained = top.start or top.checkpoint
    if chosen and chosen.statistics == "running" and not trained:
        raise Refused(
            "config.tuning.statistics='running': a new encoder has none yet; must be "
            "'batch', or set config.start to a trained encoder or run"
        )
    return encoder


def _module(top: TopLevel):
    return make_module(top.encoder, top.precision)


def make_module(section: Mapping, precision: str, field: str = "config.encoder"):
    """Make the module of a section config.encoder.

    Args:
      precision: name in `PRECISIONS`.
      field: path of the section, for messages.
    """
    make, options, _ = SECTIONS["encoder"].read(field, section)
    module = make(**options, dtype=PRECISIONS[precision])
    traits.check_encoder(module, f"{field}.name", section["name"])
    return module


def wrap_tuned(module, section: dict | str | None, weights=None):
    """Wrap an encoder so that only the part in config.tuning is trained.

    Args:
      module: the module of config.encoder.
      section: config.tuning.
      weights: its initial weights, see `tuning.TunedEncoder`.
    """
    if weights is None and not section and not traits.read_traits(module).frozen:
        return module
    settings, options, _ = SECTIONS["tuning"].read(
        "config.tuning", tuning.read_section(section)
    )
    return tuning.TunedEncoder(module, settings(**options), weights)


def nest_method(raw: Mapping[str, Any]) -> dict:
    """Rewrite flat options of config.method as sections, see `schema.nest_options`.

    Raises:
      ValueError: a name in it is unknown.
    """
    section = raw.get("method")
    if not isinstance(section, Mapping):
        return dict(raw)
    section = dict(section)
    make = lookup.find_method(section.get("name")).make
    return {**raw, "method": schema.nest_options(make, section, "config.method")}


def find_method(section) -> tuple[Callable[..., core.Method], dict]:
    """Find the `make` of a method, and check its options."""
    make, options, _ = SECTIONS["method"].read("config.method", section)
    return make, options


def make_method(top: TopLevel, chosen, parts: core.Parts) -> core.Method:
    """Make the method of config.method.

    Args:
      chosen: result of `find_method`.

    Raises:
      Refused: the method reads no such data.
    """
    make, options = chosen
    method = make(parts, **options)
    name = top.method["name"]
    if top.augment.get("name") == "graphs" and not method.takes_graphs:
        raise Refused(
            f"config.method.name={name!r}: reads images alone; take a method that "
            "reads graphs, see jaxcl list methods"
        )
    if parts.local is not None and not method.takes_local:
        raise Refused(
            f"config.augment.local: config.method.name={name!r} takes no local crops; "
            "leave the section out"
        )
    rate = traits.read_traits(parts.encoder).drop_path
    if rate and not method.drops_branches:
        raise Refused(
            f"config.encoder.drop_path={rate}: must be 0 for config.method.name="
            f"{name!r}, which gives its encoder no random numbers"
        )
    return method
