"""From a ConfigDict to a job: the only reader of config.

Each section of a config names a function and gives its keyword arguments, so
the signatures are the schema: a key that a function does not take, or a value
of another type than its default, is an error before anything is read.
"""

import collections.abc
import dataclasses
import difflib
import importlib
import inspect
import json
import pkgutil
import types
import typing

import jax
import jax.numpy as jnp
import ml_collections
from etils import epath

from jaxcl import augment as augment_lib
from jaxcl import core, job, optim, sharding
from jaxcl.data import prefetch, sources, stream, tfds_source
from jaxcl.nets import resnet

# sources.tfds passes its options on; the schema is where they arrive.
SOURCES = sources.SOURCES | {"tfds": tfds_source.read}
PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
ENCODERS = {"resnet": resnet.resnet, "conv_net": resnet.conv_net}
OPTIMIZERS = {"sgd": optim.sgd, "lars": optim.lars, "adam": optim.adam}
SCHEDULES = {
    "warmup_cosine": optim.warmup_cosine,
    "cosine": optim.cosine,
    "constant": optim.constant,
    "step_decay": optim.step_decay,
}


# Where and how a run computes, not what: these may change when it resumes.
MACHINE = ("devices", "device_bytes", "steps_per_call", "workers", "progress")


def _without(config: dict, fields) -> dict:
    return {key: value for key, value in config.items() if key not in fields}


def options(function, section, field: str, given=()) -> dict:
    """The keyword arguments that a section of the config gives a function.

    Args:
      function: whose keyword-only parameters are the allowed keys.
      section: ConfigDict or dict.
      field: its path, for messages ("config.method").
      given: parameters that the config does not set.

    Raises:
      ValueError: an unknown key (with the nearest ones), a value of another
        type than the default, or a missing key that has no default.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in given
    }
    chosen = {}
    for key, value in section.items():
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"{field}.{key}: no such option; {hint}"
                f"allowed are {', '.join(sorted(parameters)) or 'none'}"
            )
        chosen[key] = _checked(value, parameters[key], f"{field}.{key}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in chosen:
            raise ValueError(f"{field}.{name}: missing, and it has no default")
    return chosen


def _checked(value, parameter, field):
    """The value, refused where its type is not the parameter's."""
    default, annotation = parameter.default, parameter.annotation
    if isinstance(annotation, types.UnionType):
        kinds = [typing.get_origin(a) or a for a in typing.get_args(annotation)]
    elif default in (None, inspect.Parameter.empty) or value is None:
        return value
    else:
        kinds = [type(default)]
    kinds += [int] if float in kinds else []
    kinds += [list, tuple] if {list, tuple, collections.abc.Sequence} & {*kinds} else []
    # bool is an int to Python, never to a user.
    right = type(value) in kinds if isinstance(value, bool) else isinstance(
        value, tuple(kinds)
    )  # fmt: skip
    if not right:
        names = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))
        raise ValueError(f"{field}={value!r}: must be {names}; default {default!r}")
    return value


def _named(choices, section, field):
    """The function that a section's `name` picks, and the section's other keys."""
    section = dict(section)
    name = section.pop("name", None)
    core.check_choice(f"{field}.name", name, tuple(choices))
    return choices[name], section


def _module(package, name, field):
    """The module `package.name`, or an error that names those there are."""
    folder = importlib.import_module(package)
    names = [
        info.name
        for info in pkgutil.iter_modules(folder.__path__)
        if hasattr(importlib.import_module(f"{package}.{info.name}"), "make")
    ]
    core.check_choice(field, name, names)
    return importlib.import_module(f"{package}.{name}")


def build(config: ml_collections.ConfigDict, workdir) -> job.Job:
    """Everything that a run needs; reads data, compiles nothing.

    Args:
      config: what a config file's get_config made, overrides applied.
      workdir: the run directory; it must be this config's or new.

    Raises:
      ValueError: a wrong key, type or value, naming it and what is allowed; a
        run directory that belongs to another config, naming the fields.
      OSError: data is not where the config says, or cannot be read; the run
        directory cannot be written.
    """
    raw = config.to_dict()
    plain = json.loads(json.dumps(raw))
    made = _job(Top(**options(Top, raw, "config")), plain, workdir)
    # Which decoder "auto" found is part of what a run computes.
    decoder = made.stream.dataset.decoder
    claim(workdir, plain | ({"decoder": decoder} if decoder else {}))
    return made


def default_workdir(config) -> str:
    """runs/NAME of the config."""
    return f"runs/{config.get('name', 'run')}"


def claim(workdir, config: dict) -> None:
    """Write the config to its run directory, or check that it is the same."""
    path = epath.Path(workdir) / "config.json"
    old = json.loads(path.read_text()) if path.exists() else None
    sharding.barrier("the config is read")
    if old is not None:
        changed = differences(_without(old, MACHINE), _without(config, MACHINE))
        if changed:
            raise ValueError(
                f"{workdir} holds a run of another config; they differ in "
                f"{'; '.join(changed)}. Give another --workdir, or the same config"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        path.write_text(json.dumps(config, indent=1) + "\n")
    sharding.barrier("the config is written")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top:
    """What a config may set at its top level; sections are dicts."""

    data: dict  # name of a source, and its options
    scenario: dict  # name, and options of stream.make
    augment: dict  # options of augment.make, and `resize` for evaluation
    encoder: dict  # name, and its options
    method: dict  # name, and options of its make
    optimizer: dict  # name, lr, and its options
    schedule: dict  # name, and its options
    evaluators: dict  # name -> options of its make
    name: str = "run"
    seed: int = 0
    batch_size: int = 256  # global
    epochs: int = 1  # per task
    precision: str = "float32"  # of the computation; parameters stay float32
    scale_lr: bool = True  # multiply optimizer.lr by batch_size / 256
    devices: int | None = None  # how many; None: all
    steps_per_call: int | None = None  # None: 1 on CPU, 8 elsewhere
    device_bytes: int = 8 * 2**30  # sets up to this size live on the device
    workers: int = 4  # processes that decode images
    log_every: int = 10  # steps
    save_every: int = 500  # steps; 0: after tasks only
    eval_every: int = 0  # steps; 0: after tasks only
    keep: int = 2  # checkpoints
    evaluate_untrained: bool = True
    plasticity: bool = True  # also train on each task alone, for FT_i
    tensorboard: bool = True
    plots: bool = True
    progress: str | bool = "auto"  # a bar, none, or a bar on a terminal only


def _job(top: Top, plain: dict, workdir) -> job.Job:
    mesh = sharding.mesh(top.devices)
    _check_top(top, mesh)
    make_stream = _stream(top.data, top.scenario)  # options are checked first
    parts, image = _parts(top)
    _method(top.method, parts)
    tasks = make_stream()
    parts = parts._replace(num_classes=max(len(tasks.dataset.class_names), 1))
    method = _method(top.method, parts)
    eval_parts = core.EvalParts(
        embed=method.embed, stream=tasks, num_classes=parts.num_classes,
        size=image["size"], mean=tuple(image["mean"]), std=tuple(image["std"]),
        resize=image["resize"], seed=top.seed, mesh=mesh, workers=top.workers,
    )  # fmt: skip
    judges, pictures = _evaluators(top.evaluators, eval_parts, workdir)
    images = tasks.dataset.train.images
    fields = {field.name for field in dataclasses.fields(Top)}
    same = fields & {*job.Job._fields} - {"method", "evaluators", "steps_per_call"}
    made = job.Job(
        method=method,
        stream=tasks,
        task_names=tuple(task.name for task in tasks.tasks),
        evaluators=judges,
        pictures=pictures if top.plots else {},
        mesh=mesh,
        resident=images is not None and images.nbytes <= top.device_bytes,
        crop=image["crop"]._replace(decoder=tasks.dataset.decoder or "auto"),
        views=image["views"],
        steps_per_call=top.steps_per_call or (1 if sharding.on_cpu() else 8),
        record={"tensorboard": top.tensorboard, "progress": top.progress},
        quiet=False,
        config=plain,
        **{name: getattr(top, name) for name in same},
    )
    job.check(made)
    return made


def _check_top(top, mesh):
    sharding.check_batch(top.batch_size, mesh)
    for least, names in (
        (2, ("keep",)),  # a damaged newest checkpoint has one before it
        (1, ("batch_size", "epochs", "log_every", "steps_per_call")),
        (0, ("seed", "workers", "save_every", "eval_every", "device_bytes")),
    ):
        for name in names:
            value = getattr(top, name)
            if value is not None and value < least:
                raise ValueError(f"config.{name}={value}: must be at least {least}")
    core.check_choice("config.precision", top.precision, tuple(PRECISIONS))


def _stream(data, scenario):
    """A function that reads the data and cuts the tasks; options checked now."""
    source, data_options = _named(SOURCES, data, "config.data")
    data_options = options(source, data_options, "config.data")
    scenario = dict(scenario)
    scenario["scenario"] = scenario.pop("name", None)
    given = options(stream.make, scenario, "config.scenario")
    return lambda: stream.make(source(**data_options), **given)


def _parts(top: Top):
    """Parts, and what evaluators and loaders must know of the images."""
    dtype, augment = PRECISIONS[top.precision], dict(top.augment)
    resize = augment.pop("resize", None)
    given = options(augment_lib.make, augment, "config.augment", given=("dtype",))
    optimize, optimizer = _named(OPTIMIZERS, top.optimizer, "config.optimizer")
    lr = optimizer.pop("lr", None)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or lr <= 0:
        raise ValueError(f"config.optimizer.lr={lr!r}: must be a number above 0")
    curve, schedule = _named(SCHEDULES, top.schedule, "config.schedule")
    schedule = options(curve, schedule, "config.schedule", given=("epochs",))
    if "epochs" in inspect.signature(curve).parameters:
        schedule["epochs"] = top.epochs
    make_encoder, encoder = _named(ENCODERS, top.encoder, "config.encoder")
    encoder = options(make_encoder, encoder, "config.encoder", given=("dtype",))
    parts = core.Parts(
        encoder=make_encoder(**encoder, dtype=dtype),
        augment=augment_lib.make(**given, dtype=dtype),
        tx=optimize(**options(optimize, optimizer, "config.optimizer")),
        lr=curve(lr * (top.batch_size / 256 if top.scale_lr else 1.0), **schedule),
        num_classes=0,
    )
    full = inspect.signature(augment_lib.make).bind_partial(**given)
    full.apply_defaults()
    full = full.arguments
    crop = prefetch.Crop(
        size=full["size"], scale=tuple(full["scale"]), ratio=tuple(full["ratio"]),
        interpolation=full["interpolation"],
    )  # fmt: skip
    image = {key: full[key] for key in ("size", "mean", "std", "views")}
    return parts, image | {"resize": resize, "crop": crop}


def _method(method, parts):
    section = dict(method)
    module = _module("jaxcl.methods", section.pop("name", None), "config.method.name")
    chosen = options(module.make, section, "config.method")
    return module.make(parts, **chosen)


def _check_evaluation(parts):
    """Refuse images that do not reach the encoder at the size it was trained on."""
    images = parts.stream.evaluation.images
    if images is not None:
        prepare = augment_lib.make_eval(
            size=parts.size, resize=parts.resize, mean=parts.mean, std=parts.std
        )
        jax.eval_shape(prepare, jax.ShapeDtypeStruct((1, *images.shape[1:]), "uint8"))


def _evaluators(evaluators, parts, workdir):
    """Evaluators that measure, and those that draw into a directory."""
    if parts.stream.evaluation is not None and evaluators:
        _check_evaluation(parts)
    judges, pictures = {}, {}
    for name, section in evaluators.items():
        field = f"config.evaluators.{name}"
        make = _module("jaxcl.evals", name, "config.evaluators").make
        draws = {"directory"} & set(inspect.signature(make).parameters)
        chosen = options(make, section, field, given=draws)
        if draws:
            directory = epath.Path(workdir) / "plots"
            pictures[name] = make(parts, directory=directory, **chosen)
        else:
            judges[name] = make(parts, **chosen)
    return judges, pictures


def differences(old: dict, new: dict, field="config") -> list[str]:
    """The fields in which two configs differ, as "field: old -> new"."""
    found = []
    for key in sorted(set(old) | set(new)):
        a, b, name = old.get(key, "absent"), new.get(key, "absent"), f"{field}.{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, name)
        elif a != b:
            found.append(f"{name}: {a!r} -> {b!r}")
    return found
