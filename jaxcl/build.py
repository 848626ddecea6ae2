"""From a ConfigDict to a job: the only reader of config.

Each section of a config names a function and gives its keyword arguments, so
the signatures are the schema: a key that a function does not take, or a value
of another type than its default, is an error before anything is read.
"""

import collections.abc
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
from jaxcl.data import prefetch, sources, stream
from jaxcl.nets import resnet

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
    if value is None or default in (None, inspect.Parameter.empty):
        return value
    if isinstance(annotation, types.UnionType):
        kinds = [typing.get_origin(a) or a for a in typing.get_args(annotation)]
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
    made = _job(plain, workdir, **options(_job, raw, "config"))
    claim(workdir, plain)
    return made


def default_workdir(config) -> str:
    """runs/NAME of the config."""
    return f"runs/{config.get('name', 'run')}"


def claim(workdir, config: dict) -> None:
    """Write the config to its run directory, or check that it is the same."""
    path = epath.Path(workdir) / "config.json"
    if path.exists():
        old = json.loads(path.read_text())
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


def _job(
    raw,
    workdir,
    *,
    data,
    scenario,
    augment,
    encoder,
    method,
    optimizer,
    schedule,
    evaluators,
    name="run",
    seed=0,
    batch_size=256,
    epochs=1,
    precision="float32",
    scale_lr=True,
    devices=None,
    steps_per_call=None,
    device_bytes=8 * 2**30,
    workers=4,
    log_every=10,
    save_every=500,
    eval_every=0,
    keep=2,
    evaluate_untrained=True,
    plasticity=True,
    tensorboard=True,
    plots=True,
    progress: str | bool = "auto",
) -> job.Job:
    """Defaults of what the config may set at its top level.

    batch_size is global; the learning rate is `optimizer.lr`, times
    batch_size / 256 with `scale_lr`. devices: how many (None: all).
    device_bytes: sets up to this size live on the device. steps_per_call: None
    is 1 on CPU and 8 elsewhere. log_every, save_every and eval_every are in
    steps (eval_every 0: after every task only). plasticity: also train on each
    task alone, for FT_i.
    """
    del name
    mesh = sharding.mesh(devices)
    sharding.check_batch(batch_size, mesh)
    _check_least(1, batch_size=batch_size, epochs=epochs, log_every=log_every)
    _check_least(0, workers=workers, save_every=save_every, eval_every=eval_every)
    _check_least(1, steps_per_call=1 if steps_per_call is None else steps_per_call)
    _check_least(2, keep=keep)  # a damaged newest checkpoint has one before it
    core.check_choice("config.precision", precision, tuple(PRECISIONS))
    make_stream = _stream(data, scenario)  # checks options before it reads
    parts, image = _parts(
        augment, encoder, optimizer, schedule, precision, epochs,
        batch_size / 256 if scale_lr else 1.0,
    )  # fmt: skip
    the_method = _method(method, parts, 0)
    tasks = make_stream()
    num_classes = max(len(tasks.dataset.class_names), 1)
    the_method = _method(method, parts, num_classes)
    examples = tasks.dataset.train
    resident = examples.images is not None and examples.images.nbytes <= device_bytes
    eval_parts = core.EvalParts(
        embed=the_method.embed, stream=tasks, num_classes=num_classes,
        size=image["size"], mean=tuple(image["mean"]), std=tuple(image["std"]),
        resize=image["resize"], seed=seed, mesh=mesh, workers=workers,
    )  # fmt: skip
    if tasks.evaluation is not None and evaluators:
        _check_evaluation(eval_parts)
    on_cpu = jax.default_backend() == "cpu"
    judges, pictures = _evaluators(evaluators, eval_parts, workdir)
    made = job.Job(
        method=the_method,
        stream=tasks,
        task_names=tuple(task.name for task in tasks.tasks),
        evaluators=judges,
        pictures=pictures if plots else {},
        mesh=mesh,
        seed=seed,
        batch_size=batch_size,
        epochs=epochs,
        resident=resident,
        crop=image["crop"]._replace(decoder=tasks.dataset.decoder or "auto"),
        views=image["views"],
        workers=workers,
        steps_per_call=steps_per_call or (1 if on_cpu else 8),
        log_every=log_every,
        save_every=save_every,
        eval_every=eval_every,
        keep=keep,
        evaluate_untrained=evaluate_untrained,
        plasticity=plasticity,
        record={"tensorboard": tensorboard, "progress": progress},
        plots=plots,
        quiet=False,
        config=raw,
    )
    job.check(made)
    return made


def _check_least(least, **fields):
    for name, value in fields.items():
        if value < least:
            raise ValueError(f"config.{name}={value}: must be at least {least}")


def _stream(data, scenario):
    """A function that reads the data and cuts the tasks; options checked now."""
    source, data_options = _named(sources.SOURCES, data, "config.data")
    data_options = options(source, data_options, "config.data")
    scenario = dict(scenario)
    scenario["scenario"] = scenario.pop("name", None)
    given = options(stream.make, scenario, "config.scenario")
    return lambda: stream.make(source(**data_options), **given)


def _parts(augment, encoder, optimizer, schedule, precision, epochs, lr_scale):
    """Parts, and what evaluators and loaders must know of the images."""
    dtype = PRECISIONS[precision]
    augment = dict(augment)
    resize = augment.pop("resize", None)
    given = options(augment_lib.make, augment, "config.augment", given=("dtype",))
    optimize, optimizer = _named(OPTIMIZERS, optimizer, "config.optimizer")
    lr = optimizer.pop("lr", None)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or lr <= 0:
        raise ValueError(f"config.optimizer.lr={lr!r}: must be a number above 0")
    curve, schedule = _named(SCHEDULES, schedule, "config.schedule")
    schedule = options(curve, schedule, "config.schedule", given=("epochs",))
    if "epochs" in inspect.signature(curve).parameters:
        schedule["epochs"] = epochs
    make_encoder, encoder = _named(ENCODERS, encoder, "config.encoder")
    encoder = options(make_encoder, encoder, "config.encoder", given=("dtype",))
    parts = core.Parts(
        encoder=make_encoder(**encoder, dtype=dtype),
        augment=augment_lib.make(**given, dtype=dtype),
        tx=optimize(**options(optimize, optimizer, "config.optimizer")),
        lr=curve(lr * lr_scale, **schedule),
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


def _method(method, parts, num_classes):
    section = dict(method)
    module = _module("jaxcl.methods", section.pop("name", None), "config.method.name")
    chosen = options(module.make, section, "config.method")
    return module.make(parts._replace(num_classes=num_classes), **chosen)


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
