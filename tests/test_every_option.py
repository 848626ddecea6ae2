"""Every option is read: another value changes what the program does.

Each function that a config can name is called with its defaults, and again with one
option changed. What is observed must differ: the traced step, the shapes of the state,
the other programs of a method, what an evaluator returns, or what a source reads. A
step is traced and never compiled.

A new option needs nothing here if any legal value changes the defaults. If it is read
only beside others, `BESIDE` names these; `VALUES` has the values that no annotation
tells.
"""

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import operator
import pathlib
import re
import shutil
import tempfile
import types
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from sklearn import manifold, svm

from helpers import (
    annotations,
    eval_toy,
    forward,
    graph_sets,
    memory_toy,
    run_directories,
    tfds_sets,
    toy,
)
from helpers.config_functions import FUNCTIONS
from jaxcl import core, optim, plots, schema
from jaxcl.config import build, sections
from jaxcl.data import stream
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.feed import graph_batches
from jaxcl.data.sources import by_name, convert, features, in_memory, shards
from jaxcl.data.stream import scenarios
from jaxcl.memory import buffer
from jaxcl.methods import online_ssl, two_view
from jaxcl.methods.icl import ddpg
from jaxcl.methods.online import replay as replay_lib
from jaxcl.nets import gin, mlp, resnet, traits, tuning, vit
from jaxcl.run import job

CLASSES, ROWS, BATCH = 4, 24, 6
VIEWS = dict(size=8, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
VIT = dict(width=8, layers=2, heads=2, hidden=8, patch=2, image_size=4)

SMALL = dict(
    hidden_dim=8,
    output_dim=4,
    memory_size=8,
    queue_size=12,
    prototypes=4,
    slices=4,
    predictor_hidden_dim=8,
    distill_hidden_dim=8,
    projections=8,
)


# What is observed


@functools.cache  # programs of passes and of functions of jnp come again and again
def text(program) -> str:
    """A digest of a traced program, the arrays inside it included."""
    arrays = [np.asarray(x).tobytes() for x in program.consts if hasattr(x, "tobytes")]
    return hashlib.sha256(b"".join([equations(program.jaxpr, {}), *arrays])).hexdigest()


def equations(jaxpr, seen) -> bytes:
    """A digest of the equations of a program, many times faster than its text.

    Args:
      seen: digests of the programs inside it, which are often the same.
    """
    if id(jaxpr) in seen:
        return seen[id(jaxpr)]
    numbers, lines = {}, []

    def number(x):
        if hasattr(x, "val"):
            return clean(repr(x.val))
        return numbers.setdefault(x, len(numbers))

    def parameter(x):
        if isinstance(x, tuple | list):
            return [parameter(y) for y in x]
        if hasattr(x, "jaxpr"):
            return text(x)
        if hasattr(x, "eqns"):
            return equations(x, seen)
        return None if callable(x) else clean(repr(x))

    for x in (*jaxpr.constvars, *jaxpr.invars):
        lines.append((number(x), type_name(x.aval)))
    for line in jaxpr.eqns:
        lines.append(
            (
                line.primitive.name,
                [number(x) for x in line.invars],
                [type_name(x.aval) for x in line.outvars],
                [(name, parameter(x)) for name, x in line.params.items()],
            )
        )
        for x in line.outvars:
            number(x)
    lines.append([number(x) for x in jaxpr.outvars])
    seen[id(jaxpr)] = hashlib.sha256(repr(lines).encode()).digest()
    return seen[id(jaxpr)]


type_name = functools.cache(str)


def clean(line):
    return re.sub("0x[0-9a-f]+", "", line)


def traced(function, *arguments):
    """A program without its gradients, and the shapes that it returns."""
    with forward.cheap_traces():
        return jax.make_jaxpr(function, return_shape=True)(*arguments)


@pytest.fixture(autouse=True, scope="module")
def _traces_without_gradients_serve_no_other_test():
    yield
    forward.forget_traces()
    text.cache_clear()
    USUAL.clear()
    jax.clear_caches()


def key_data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def summary(value):
    """What a value holds, to be compared; of a function its name alone."""
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(key_data(value))
        return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): summary(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [summary(x) for x in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


# Methods


def plain(images):
    return images.astype(jnp.float32) / 128 - 1


def augment(views):
    """Views that are shifted by a draw for each example."""
    if views == "graphs":
        return augment_graphs.make()

    def shift(key, images):
        moved = jax.random.normal(key, (len(images), views, 1, 1, 1))
        return plain(images)[:, None] + moved

    return shift


@functools.cache
def examples():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 4, 4, 1)).astype(np.uint8)
    label = (np.arange(ROWS) // (ROWS // CLASSES)).astype(np.int32)
    return stream.Examples(label, np.zeros_like(label), images)


def tasks():
    """Two tasks of two classes, the second with earlier rows."""
    half = np.arange(ROWS // 2, dtype=np.int32)
    for index, rows in enumerate((half, half + ROWS // 2)):
        source, classes = stream.Source(examples(), rows), np.arange(2) + 2 * index
        earlier = half[: len(half) * index]
        yield stream.Task(index, str(index), classes, -1, source, half, earlier)


@functools.cache
def encoder(name):
    if name == "vit":
        return vit.vit(**VIT, features="mean")
    if name == "gin":
        return gin.gin(width=4, layers=1)
    if name == "resnet":
        return resnet.resnet(depth=10, width=2)
    return mlp.perceptron(widths=(5,), batch_norm=True)


def rate(peak):
    return optim.by_task([optim.cosine(peak, epochs=2)])


def parts_of(net="mlp", views=2, replay=types.MappingProxyType({}), **more):
    given = dict(
        encoder=encoder(net),
        augment=augment(views),
        eval_transform=plain,
        tx=optim.sgd(),
        lr=rate(0.1),
        schedule_with_peak=rate,
        num_classes=CLASSES,
        replay=replay_lib.settings(CLASSES, BATCH, **{"capacity": 8, **replay}),
        num_tasks=2,
        batch_size=BATCH,
        train_rows=ROWS,
    )
    return core.Parts(**given | more)


TEACHER = core.Teacher(
    lambda weights, views: views.reshape(len(views), -1) @ weights,
    np.ones((16, 3), np.float32),
    width=3,
    channels=1,
)


def batch_of(method, parts=1, graph=False):
    if graph:
        return graph_batches.blank_batch(graphs(), BATCH, parts)
    rows = np.arange(BATCH, dtype=np.int32)
    batch = {"image": examples().images[rows], "label": examples().label[rows]}
    batch["index"] = rows
    if parts > 1:
        batch = jax.tree.map(lambda x: np.stack([x] * parts), batch)
    batch = batch | ({"labelled": batch} if method.labelled else {})
    constants = method.constants
    return batch | ({} if constants is None else {"constants": constants})


class Shapes(str):
    """The shapes of a state, and the options that it is of."""

    def __new__(cls, state, options):
        leaves = [str(x) for x in jax.tree.leaves(state)]
        made = super().__new__(cls, f"{jax.tree.structure(state)} {leaves}")
        made.state, made.options = state, options
        return made

    def suit(self, options) -> bool:
        """Whether other options have such a state: what differs is no size."""
        values = [x for name, x in options.items() if self.options.get(name) != x]
        return all(isinstance(x, float) for x in values)


def of_method(make, options):
    """What a method does, in the order in which options are usually read."""
    options, calls = dict(options), []
    parts = parts_of(**options.pop("parts", {}))
    with dry_runs(calls):  # some programs are made here and run later
        method = make(parts, **options)
    key, batch = (
        jax.random.key(0),
        batch_of(method, graph=parts.encoder == encoder("gin")),
    )

    def steps(state):
        widths = dict.fromkeys(method.batches_per_step(task) for task in tasks())
        batches = [batch_of(method, width, "graph" in batch) for width in widths]
        return [text(traced(method.step, state, rows)[0]) for rows in batches]

    usual, found = (yield summary(method)), None
    if isinstance(usual, Shapes) and usual.suit(options):  # `init` is half of a trace
        with contextlib.suppress(Exception):  # as it is raised for the state below
            found = steps(usual.state)
    if found is not None:
        yield usual
        yield found
    program, state = traced(method.init, key, batch)
    yield Shapes(state, options)
    if found is None:
        yield steps(state)
        yield Shapes(state, options)
    yield text(program)
    images = batch.get("graph", np.zeros((2, 4, 4, 1), np.float32))
    for name in ("embed", "predict", "project"):
        if (function := getattr(method, name)) is not None:
            yield text(traced(function, state, images)[0])
    if method.objective is not None:
        yield text(traced(method.objective, state, key, batch)[0])
    state, task = numbers_like(state), list(tasks())[1]
    for hook in (
        lambda: method.eval_state(state),
        lambda: plan_of(method.source(state, task)),
        lambda: method.begin_task(state, task),
        lambda: method.end_task(state, task),
    ):
        with dry_runs(calls):
            found = hook()
        yield summary(found), [*calls]


def plan_of(source):
    return stream.schedule(source, seed=0, task=1, epochs=1, batch_size=BATCH)


def numbers_like(shapes):
    """Any state of these shapes; all slots of its memories hold rows."""
    rng = np.random.default_rng(0)

    def array(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        draws = rng.uniform(0.1, 1, x.shape) if x.ndim else 0
        return jnp.asarray(
            draws if jnp.issubdtype(x.dtype, jnp.floating) else np.ones(x.shape),
            x.dtype,
        )

    return jax.tree.map(array, shapes)


@contextlib.contextmanager
def dry_runs(calls):
    """What is passed to `jax.jit` here is traced, and gives any numbers.

    Args:
      calls: a list to which each call adds its program and its arguments.
    """

    def jit(function=None, *, static_argnums=(), static_argnames=(), **_):
        if function is None:
            return functools.partial(
                jit, static_argnums=static_argnums, static_argnames=static_argnames
            )
        seen = {}

        def call(*arguments, **named):
            if any(
                isinstance(x, jax.core.Tracer)
                for x in jax.tree.leaves((arguments, named))
            ):
                return function(*arguments, **named)
            known = str(
                jax.tree.map(lambda x: getattr(x, "shape", x), (arguments, named))
            )
            if known not in seen:
                fixed = {k: v for k, v in named.items() if k in static_argnames}
                trace = jax.make_jaxpr(
                    functools.partial(function, **fixed),
                    static_argnums=static_argnums,
                    return_shape=True,
                )
                moving = {k: v for k, v in named.items() if k not in fixed}
                program, shapes = trace(*arguments, **moving)
                seen[known] = text(program), shapes
            program, shapes = seen[known]
            calls.append((program, summary((arguments, named))))
            return numbers_like(shapes)

        return call

    with mock.patch.object(jax, "jit", jit), forward.cheap_traces():
        yield


# What a config builds for every method


def of_encoder(make, options):
    """Parameters, and the program of a pass that trains."""
    net, key = make(**options), jax.random.key(0)
    side = 16 if "depth" in options else 8  # halved three times
    rows = np.zeros((2, side, side, 3), np.float32)
    if make in sections.GRAPH_ENCODERS.values():
        rows = graph_batches.blank_batch(graphs(), BATCH)["graph"]

    draws = "key" in inspect.signature(net.__call__).parameters

    def apply(key, variables):
        keys = {"key": key} if draws else {"rngs": {"dropout": key}}
        return net.apply(variables, rows, train=True, mutable=True, **keys)

    program, variables = traced(lambda key: net.init(key, rows, train=False), key)
    yield summary(traits.read_traits(net))
    yield text(program)
    yield text(jax.make_jaxpr(apply)(key, variables))


def of_optimizer(make, options):
    params = {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}
    tx = make(**options)
    state = tx.init(params)
    yield summary(state)
    yield text(jax.make_jaxpr(lambda *x: tx.update(*x, lr=0.1))(params, state, params))


def of_schedule(make, options):
    yield [float(make(0.1, **options)(x)) for x in np.linspace(0, 0.999, 41)]


IMAGES = np.zeros((2, 8, 8, 3), np.uint8)


def of_views(make, options):
    view = make(**options)
    keyed = "views" in schema.option_of(make)
    yield text(jax.make_jaxpr(view)(*[jax.random.key(0)] * keyed, IMAGES))


def of_graph_views(make, options):
    batch = graph_batches.blank_batch(graphs(), BATCH)["graph"]
    yield text(jax.make_jaxpr(make(**options))(jax.random.key(0), batch))


@functools.cache
def graphs():
    made = graph_sets.random_set(12, np.random.default_rng(0))
    whole = stream.Examples(made.label, np.zeros_like(made.label), graphs=made)
    return whole


def of_tuning(_, options):
    """Shapes and rates of what trains, and the program of a pass that trains."""
    options = dict(options)
    bare = encoder(options.pop("net", "vit"))
    net = tuning.TunedEncoder(bare, tuning.settings(**options))
    rows, key = np.zeros((2, 4, 4, 1), np.float32), jax.random.key(0)
    program, variables = traced(lambda key: net.init(key, rows, train=False), key)
    yield text(program)
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    paths = [tuple(key.key for key in path) for path, _ in leaves]
    yield [(path, net.rate_share(path)) for path in paths]

    def apply(variables):
        return net.apply(variables, rows, train=True, mutable=["batch_stats"])

    yield text(jax.make_jaxpr(apply)(variables))


def of_agent(_, options):
    """The programs of an agent, see `ddpg`."""
    options, key = ddpg.Options(**options), jax.random.key(0)
    program, agent = traced(lambda key: ddpg.init(key, options), key)
    yield text(program)
    for function in (
        lambda agent: ddpg.choose_rate(agent, key, options),
        lambda agent: ddpg.observe(agent, key, jnp.float32(1), options),
    ):
        yield text(traced(function, agent)[0])


# Data


def of_source(make, options):
    """What a source reads; the fields of a reader, and the first image.

    A path in the options is below `sets`.
    """
    root = str(sets()) if "ROOT" in str(options) else ""
    data = make(
        **{
            name: value.replace("ROOT", root) if isinstance(value, str) else value
            for name, value in options.items()
        }
    )
    yield summary(data)
    yield [summary(x.read(0)) for x in data[3:6] if x is not None and x.reader]


def of_scenario(options):
    """The tasks, and the first rows that the first one trains on."""
    options = dict(options)
    domains = 1 if options["name"] in ("permuted", "rotated") else 3
    cut = scenarios.make(looks(domains), **options)
    plans = [
        stream.schedule(x.train, seed=0, task=x.index, epochs=1, batch_size=4)
        for x in cut.tasks
    ]
    yield (
        summary([x._replace(train=x.train.rows) for x in cut.tasks]),
        len(cut.evaluation.label) if cut.evaluation else 0,
    )
    yield [[plan[0].tolist(), len(plan)] for plan in plans]


@functools.cache
def looks(domains):
    """Rows of six classes in a few domains."""
    rng = np.random.default_rng(0)

    def split(rows):
        label = (np.arange(rows) % 6).astype(np.int32)
        images = rng.integers(0, 256, (rows, 4, 4, 1)).astype(np.uint8)
        return stream.Examples(
            label, (np.arange(rows) // 6 % domains).astype(np.int32), images
        )

    return stream.Dataset(
        "looks",
        tuple("abcdef"),
        tuple("xyz"[:domains]),
        split(90),
        split(36),
        split(36),
    )


@functools.cache
def sets() -> pathlib.Path:
    """A folder with a small set of each kind, and another one of the same kind."""
    root = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    rng, label = np.random.default_rng(0), np.arange(12, dtype=np.int32) % 3
    images = rng.integers(0, 256, (12, 6, 6, 3)).astype(np.uint8)
    rows = {"train_x": rng.normal(size=(12, 4)).astype(np.float32), "train_y": label}
    made = graph_sets.random_set(12, rng)
    arrays = {"edges": made.edges, "graph_ptr": made.graph_ptr, "label": made.label}
    arrays["node_attr"] = np.abs(made.features) + 1
    names = np.array(["a", "b", "c"])
    for end in ("", "2"):
        np.savez(
            root / f"set{end}.npz",
            x=images,
            y=label,
            is_test=label < 0,
            class_names=names,
        )
        features.write(str(root / f"features{end}.npz"), rows, {})
        np.savez(root / f"graphs{end}.npz", **arrays)
        data = by_name.load("npz", path=str(root / f"set{end}.npz"))
        convert.write_arrays(data, str(root / f"arrays{end}"))
        folder = root / f"folder{end}"
        for row, pixels in enumerate(images):
            file = folder / "abc"[label[row]] / f"{row}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
        lines = [f"{'abc'[label[row]]}/{row}.png {label[row]}\n" for row in range(12)]
        for name, count in (("train", 12), ("test", 6), ("more", 3)):
            for domain in ("all", "few"):
                (folder / f"{domain}_{name}.txt").write_text(
                    "".join(lines[domain == "few" : count])
                )
        for split, where in (
            ("train", slice(0, 9)),
            ("test", slice(9, 12)),
            ("more", slice(0, 3)),
        ):
            structs = [
                {"bytes": tfds_sets.encoded(x), "path": None} for x in images[where]
            ]
            columns = {"image": structs, "label": label[where]}
            columns |= {"picture": structs[::-1], "class": label[where][::-1]}
            file = root / f"parquet{end}" / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(exist_ok=True)
            parquet.write_table(pyarrow.table(columns), file)
        (root / f"lists{end}").mkdir()
        for file in folder.glob("*.txt"):
            (root / f"lists{end}" / file.name).write_text("".join(lines[:9]))
        data = by_name.load("image_folder", path=str(folder), test=0.0)
        shards.write_shards(data, str(root / f"shards{end}"))
    (root / "classes.txt").write_text("c\nb\n")
    (root / "names.txt").write_text("x\ny\nz\n")
    (root / "numbers.txt").write_text("2\n1\n")
    tfds_sets.array_record(root / "tfds")
    shutil.copytree(root / "tfds", root / "tfds2")
    return root


STORED = in_memory.store_set(
    "stored", np.arange(192, dtype=np.uint8).reshape(12, 4, 4), labels=[0, 1, 2] * 4
)


# Whole configs

MLP = {"name": "mlp", "widths": (4,)}
CHEAP_VIEWS = {"augment.crop": False, "augment.flip": 0.5}
CHEAP_VIEWS |= {"augment.jitter_probability": 0.0}
ER = toy.ONLINE | {"method": {"name": "er"}, "encoder": MLP}
TOY_VIT = {"encoder": {"name": "vit"} | VIT | {"patch": 4, "image_size": 8}}
SECTIONS = {x: y for x, y in toy.config().to_dict().items() if isinstance(y, dict)}


def of_config(_, changes):
    """The records of a job, what building it prints, and the program of its step."""
    changes, printed = {"encoder": MLP} | CHEAP_VIEWS | changes, io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(printed):
            work = run_directories.untried(pathlib.Path(folder), **changes)
    yield type(work).__name__, printed.getvalue()
    yield build.default_workdir(toy.config(**changes))
    if not isinstance(work, job.Job):
        return
    yield summary(work.loop._replace(replay=None)), summary(work.logging)
    alone = work.evaluation.single_tasks is not None
    yield summary(work.evaluation._replace(single_tasks=alone)), work.mesh.devices.shape
    yield summary(work.data._replace(stream=work.stream.tasks))
    state = job.shapes(work.method, work.data)[0]
    yield [str(x) for x in jax.tree.leaves(state)]
    for parts in dict.fromkeys(map(work.method.batches_per_step, work.stream.tasks)):
        shapes = job.placed_shapes(work.method, work.data, work.mesh, parts)
        yield text(traced(work.method.step, *shapes)[0])
    rows = np.zeros((2, 8, 8, 1), np.float32)
    for function in filter(None, (work.method.embed, work.method.predict)):
        yield text(jax.make_jaxpr(function)(state, rows))
    yield text(jax.make_jaxpr(work.method.eval_state)(state))


def of_replay(make, options):
    beside = {x: options[x] for x in options if x == "devices"}
    replay = {x: y for x, y in options.items() if x not in beside}
    yield from of_config(make, ER | beside | {"replay": replay})


def of_mesh(make, options):
    yield from of_config(make, TOY_VIT | {"devices": None, "mesh": options})


# Evaluators


class Judged(NamedTuple):
    """What evaluators read of a state."""

    step: jax.Array
    key: jax.Array
    params: dict
    replayed: jax.Array
    memory: buffer.Buffer


@functools.cache
def judged():
    """A state after the second of three tasks, whose memory is full."""
    rows = eval_toy.dataset().train
    items = {"image": rows.images[:12], "label": rows.label[:12]}
    items["task"] = rows.label[:12] // 2
    memory = buffer.Buffer(items, np.ones(12, bool), np.int32(50))
    params, replayed = memory_toy.state_of(1)
    return Judged(jnp.int32(9), jax.random.key(0), params, replayed, memory)


def of_evaluator(make, options):
    """What an evaluator returns, what it draws, and the programs that it calls."""
    options, calls, figures = dict(options), [], []
    given = dict.fromkeys(("embed", "project", "predict"), eval_toy.embed)
    given |= {name: operator.attrgetter(name) for name in ("memory", "replayed")}
    given["objective"] = lambda state, key, batch: jnp.mean(batch["image"] / 255)
    given["project"] = lambda *x: eval_toy.embed(*x)[:, 1:]
    given["predict"] = lambda *x: jnp.tile(eval_toy.embed(*x), 2)[:, : eval_toy.CLASSES]
    parts = eval_toy.parts_of(**given)
    if "directory" in schema.option_of(make):
        options.setdefault("directory", tempfile.mkdtemp())

    def keep(figure, path):
        drawn = [x for axes in figure.axes for x in (*axes.images, *axes.collections)]
        figures.append((str(path), len(figure.axes)))
        figures.extend(
            summary(np.ma.getdata(x.get_array()))
            for x in drawn
            if x.get_array() is not None
        )
        figures.extend(
            summary(np.ma.getdata(x.get_offsets()))
            for x in drawn
            if hasattr(x, "get_offsets")
        )

    def fit(machine, x, y, fitted=svm.SVC.fit):
        calls.append((machine.C, summary(x)))
        return fitted(machine, x, y)

    def place(machine, x):
        calls.append((machine.get_params(), summary(x)))
        return x[:, :2]

    with (
        dry_runs(calls),
        mock.patch.object(plots, "save_figure", keep),
        mock.patch.object(svm.SVC, "fit", fit),
        mock.patch.object(manifold.TSNE, "fit_transform", place),
    ):
        found = make(parts, **options)(judged(), 1)
    yield summary(found), figures, calls


# Tables

# Options that no observation can see, with the reason. One that can is an error.
UNSEEN = {
    "top": {
        "regime": "other values of a config file follow it, see configs/papers/pnr.py",
        "compile_cache": "a folder of programs, see test_compile_cache.py",
        "duplicates": "counts equal images for a message, see test_identity.py",
    },
    "jaxcl.evals.collapse": {"share": "of earlier calls, see test_collapse.py"},
    "source tfds": {"index": "keeps a scan; what is read stays, see test_sources.py"},
    "encoder vit": {"attention": "programs of a GPU; elsewhere XLA's is taken"},
    "scenario joint": {"class_order": "of other scenarios, whose config runs as this"},
    "scenario data": {"class_order": "of other scenarios, whose config runs as this"},
}

# function -> option -> the value to try
VALUES = {
    "jaxcl.methods.mir": {"candidates": 7},
    "jaxcl.methods.online_ssl": {"base": "byol", "regulariser": "cassle"},
    "jaxcl.methods.icl": {"agent": {"low": 1e-5}, "inner_steps": 2},
    "jaxcl.methods.two_view": {"base": "nnclr", "strategy": "cassle"},
    "encoder resnet": {"pool": 1},
    "base diet": {"rows": 30},
    "augment graphs": {"kinds": ("drop",)},
    "scenario": {"name": "data", "classes": (0, 1, 2)},
    **dict.fromkeys(
        [f"scenario {x}" for x in scenarios.SCENARIOS],
        {"class_order": (5, 4, 3, 2, 1, 0), "domain_order": ("z", "y", "x")},
    ),
    "long_tail": {"class_order": (5, 4, 3, 2, 1, 0)},
    "imbalance": {"dominant": (1, 3, 5), "rho_max": 0.8},
    "replay": {"policy": "fifo", "measure": ("drift",), "flops": 1e5},
    "source graphs": {"features": ("ldp",)},
    "mesh": {"data": 4, "model": 2},
    "jaxcl.evals.linear": {"lrs": (0.1, 0.2), "scale": (0.5, 1.0)},
    "jaxcl.evals.svm": {"max_rows": 26},
    "jaxcl.evals.objective": {"max_rows": 3},
    "source joined": {"sets": [{"name": "digits"}]},
    "source judged_by": dict.fromkeys(
        ("train", "test"), {"name": "digits", "size": 12}
    ),
    "source image_lists": {
        "train": "few_train.txt",
        "validation_list": "all_more.txt",
        "domains": ("all", "few"),
    },
    "source tfds": {
        "train_split": "train[:50%]",
        "validation_split": "train[50%:]",
        "test_split": None,
        "domain_key": "style",
    },
    "source huggingface": {
        "train_split": "more",
        "validation_split": "more",
        "image_key": "picture",
        "label_key": "class",
    },
    "jaxcl.evals.neighbours": {"directory": "elsewhere"},
    "jaxcl.evals.tsne": {"directory": "elsewhere", "max_points": 12, "perplexity": 2.0},
    "top": {
        "data": {"name": "digits", "validation": 0.2},
        "scenario": {"name": "class", "num_tasks": 2},
        "augment": SECTIONS["augment"] | {"flip": 0.5},
        "encoder": MLP | {"widths": (3,)},
        "method": SECTIONS["method"] | {"base": "simclr"},
        "optimizer": {"name": "adam", "lr": 0.3},
        "schedule": {"name": "constant"},
        "evaluators": {"knn": {}},
        "replay": {"capacity": 30},
        "tuning": "lora",
        "mesh": {"data": 2},
        "name": "another",
        "loggers": "tensorboard",
        "device_bytes": 10,
        "seeds": 2,
        "accumulate": 2,
        "devices": 2,
        "batch_size": 24,
    },
}

# function -> options of every call. "parts": of what a config builds.
ALWAYS = {
    "jaxcl.methods.aser": {"per_class": 1, "parts": {"replay": {"capacity": 16}}},
    "jaxcl.methods.cclis": {"parts": {"views": 1}},
    "jaxcl.methods.icl": {"inner_steps": 1},  # a step has as many, written out
    "jaxcl.methods.gdumb": {
        "passes": 4,
        "parts": {"replay": {"policy": "greedy_balanced"}},
    },
    "jaxcl.methods.duel": {"hidden_layers": 1},
    "jaxcl.evals.logistic": {"pad": 2},
    "jaxcl.evals.svm": {"folds": 2, "inner_folds": 2, "penalties": (0.1, 1.0)},
    "jaxcl.evals.neighbours": {"queries": 2, "k": 2},
    "top": {x: y for x, y in toy.config().items() if not hasattr(y, "items")},
    "replay": {"capacity": 64},
    "mesh": {"data": 2},
    "base diet": {"output_dim": None, "strategy": "l2_sp"},
    "base dino": {"strategy": "finetune"},
    "strategy distil": {"parts": {"teacher": TEACHER}},
    "encoder vit": VIT,
    "encoder convnext": {"depths": (1, 1), "width": 4, "patch": 2},
    "encoder gcn": {"width": 4, "layers": 2},
    "encoder gin": {"width": 4, "layers": 2},
    "encoder resnet": {"depth": 10, "width": 4},
    "schedule warmup_cosine": {"epochs": 20},
    "schedule cosine": {"epochs": 20},
    "schedule step_decay": {"epochs": 20, "milestones": (5, 10)},
    "schedule ramped_cosine": {"epochs": 20},
    "augment images": VIEWS,
    "augment images of evaluation": VIEWS | {"resize": 9},
    "augment local": {"views": 2, "size": 4},
    "source npz": {"path": "ROOT/set.npz"},
    "source arrays": {"path": "ROOT/arrays"},
    "source features": {"path": "ROOT/features.npz"},
    "source graphs": {"path": "ROOT/graphs.npz"},
    "source image_folder": {"path": "ROOT/folder"},
    "source few_rows": {"path": "ROOT/folder", "per_class": 2, "most_classes": 3},
    "source image_lists": {
        "path": "ROOT/folder",
        "train": "all_train.txt",
        "test": "all_test.txt",
    },
    "source huggingface": {"path": "ROOT/parquet"},
    "source shards": {"path": "ROOT/shards"},
    "source tfds": {"path": "ROOT/tfds/toy/1.0.0"},
    "source shapes": {"train": 12, "test": 6, "size": 16},
    "source joined": {"sets": [{"name": "digits"}, {"name": "digits"}]},
    "source judged_by": dict.fromkeys(("train", "test"), {"name": "digits"}),
    "source in_memory": {x: STORED.section[x] for x in ("set", "sha256")},
    "scenario blurry": {"num_tasks": 3},
    "scenario joint": {"num_tasks": None},
    "scenario domain": {"num_tasks": None},
    "scenario permuted": {"num_tasks": 2},
    "scenario rotated": {"num_tasks": 2},
    "scenario growth": {"num_tasks": None},
    "imbalance": {"rho_max": 0.6},
    "long_tail": {"factor": 3.0},
}

# function -> options that name a file or a run: one that is not there is refused
PATH_OPTIONS = ("path", "classes", "lists", "class_names")
PATHS = {
    "top": ("start", "teacher", "checkpoint", "plasticity_from", "loggers"),
    **{f"source {x}": PATH_OPTIONS for x in by_name.SOURCES},
    "source tfds": (*PATH_OPTIONS, "image_key"),
    "source in_memory": ("set", "sha256"),
}

CONTRASTIVE = {"base": "simclr", "predictor_hidden_dim": None}
# function -> option -> further options, with which it is read
BESIDE = {
    "jaxcl.methods.der": {"draws": {"beta": 0.5}},
    "jaxcl.methods.er_aml": {"temperature": {"loss": "sup_con"}},
    "jaxcl.methods.duel": {
        "hml_weight": {"negatives": "memory"},
    },
    "jaxcl.methods.icl": {
        "strategy": {"inner_steps": None},
        "meta": {"inner_steps": None},
        "with_positive": {"strategy": "retrain", "inner_steps": None},
        "fixed_lr": {"learnt_rate": False},
        "inner_lr": {"learnt_rate": False},
        "replay_share": {"strategy": "replay", "inner_steps": None},
        "distill_weight": {"strategy": "distill", "inner_steps": None},
        "projector": {"output_dim": 0},
        "anchors": {"parts": {"net": "gin", "views": "graphs"}},
    },
    "encoder vit": {"size": dict.fromkeys(("width", "heads", "hidden"))},
    "encoder convnext": {"size": {"width": None}},
    "base barlow_twins": {"form": {"strategy": "pnr"}},
    "base supcon": {"pseudo_negatives": {"strategy": "pnr"}},
    "base dino": {
        "distill_temperature": {"strategy": "cassle"},
        "ibot": {"parts": {"net": "vit"}},
        "mask_share": {"parts": {"net": "vit"}, "ibot": 1.0},
        "mask_chance": {"parts": {"net": "vit"}, "ibot": 1.0},
    },
    "strategy pnr": dict.fromkeys(("pn1", "pn2"), CONTRASTIVE)
    | {
        "teacher_ema": {"teacher": "ema"},
        "snapshot_every": {"teacher": "snapshot"},
    },
    "regulariser pnr": {
        "pn1": CONTRASTIVE,
        "pn2": CONTRASTIVE,
        "snapshot_every": {"teacher": "snapshot"},
    },
    "regulariser cassle": {"snapshot_every": {"teacher": "snapshot"}},
    "strategy distil": {"head_dim": {"head_layers": 1}},
    "strategy cassle": {
        "teacher_ema": {"teacher": "ema"},
        "snapshot_every": {"teacher": "snapshot"},
    },
    "augment images": {"sigma": {"blur": (0.5, 0.5)}, "pad": {"crop": False}},
    "example source": {"seed": {"validation": 0.5}},
    "source digits": {"interpolation": {"size": 12}},
    "source digits_in_looks": {"interpolation": {"size": 12}},
    "source few_rows": {"size": {"path": None}},
    "source graphs": {"std": {"features": ("ldp",)}},
    "source image_lists": {
        "domains": {"train": "{domain}_train.txt", "test": "{domain}_test.txt"}
    },
    "scenario": {"seed": {"class_order": "shuffled"}},
    "long_tail": {"seed": {"class_order": "shuffled"}},
    "top": {
        "replay": ER,
        "tuning": TOY_VIT,
        "mesh": TOY_VIT | {"devices": None},
        "evaluate_untrained": {"evaluators": {"knn": {}}},
        "plasticity": {"evaluators": {"knn": {}}},
        "plasticity_from": {"evaluators": {"knn": {}}, "plasticity": True},
    },
    "jaxcl.evals.objective": {"max_rows": {"batch_size": 2}},
    "source in_memory": {"test_seed": {"test": 0.3}},
    "source huggingface": dict.fromkeys(
        ("test", "test_seed"), {"test_split": None, "test": 0.3}
    ),
    "jaxcl.methods.gdumb": {"balanced": {"parts": {}}},
    "jaxcl.evals.filtering": {"temperature": {"score": "exponential"}},
    "replay": {"per_class": {"capacity": None}, "sharded": {"devices": 2}},
    "optimizer sgd": {"exclude_1d": {"weight_decay": 0.1}},
    "optimizer adam": {"exclude_1d": {"weight_decay": 0.1}},
    "agent": {"window": {"state": "window"}},
    "tuning": {
        **dict.fromkeys(
            ("lora_alpha", "lora_on", "open_layers", "norms"), {"lora_rank": 2}
        ),
        "statistics": {"net": "resnet"},
    },
    "jaxcl.methods.two_view": {
        **dict.fromkeys(("head_lr", "head_form"), {"online_head": True}),
    },
    "jaxcl.methods.gcr": {
        "ridge": {"parts": {"replay": {"capacity": 4}}, "candidates": 8}
    },
    "jaxcl.methods.online_ssl": {
        "rows": {"regulariser": "cassle"},
        "momentum": {"base": "byol"},
    },
}

for _name, _make in by_name.SOURCES.items():
    if "validation" in schema.option_of(_make):
        BESIDE.setdefault(f"source {_name}", {})["seed"] = {"validation": 0.5}


# All


OBSERVERS = {
    "jaxcl.methods": of_method,
    "method": of_method,
    "jaxcl.evals": of_evaluator,
    "evaluator": of_evaluator,
    "encoder": of_encoder,
    "optimizer": of_optimizer,
    "schedule": of_schedule,
    "source": of_source,
    "augment images": of_views,
    "augment local": lambda make, options: of_views(
        functools.partial(make, VIEWS), options
    ),
    "augment graphs": of_graph_views,
    "agent": of_agent,
    "tuning": of_tuning,
    "top": of_config,
    "replay": of_replay,
    "mesh": of_mesh,
}
# Functions that another one calls: it, the option that names them, the options beside.
CALLED_BY = {
    "base": (two_view.make, {"strategy": "cassle"}),
    "strategy": (two_view.make, {"base": "byol"}),
    "regulariser": (online_ssl.make, {"base": "byol"}),
}


class Call(NamedTuple):
    """How the options of a function are observed."""

    observe: object  # options -> observations, the cheap ones first
    always: dict = {}


def call_of(where) -> Call:
    make, more = FUNCTIONS[where], ALWAYS.get(where, {})
    kind, _, name = where.removeprefix("example ").partition(" ")
    if kind in CALLED_BY:
        make, beside = CALLED_BY[kind]
        more = beside | {kind: name or f"my_package.my_{kind}"} | more
        known = toy.names_of_options(make, SMALL | more)
        observe = of_method
    elif kind in ("imbalance", "long_tail", "scenario"):
        always = {"name": name or "class", "num_tasks": 3}
        if kind != "scenario":
            return Call(lambda x: of_scenario(always | {kind: x}), more)
        return Call(of_scenario, always | more)
    else:
        known = schema.option_of(make)
        name = where.removeprefix("example ")
        observe = next(y for x, y in OBSERVERS.items() if name.startswith(x))
    small = {x: value for x, value in SMALL.items() if x in known}
    return Call(functools.partial(observe, make), small | more)


def options_of(where):
    """The options that are of the function itself."""
    function = FUNCTIONS[where]
    for name, option in schema.option_of(function).items():
        if option.function is schema.unwrap(function) and name != "dtype":
            yield name, option


def differ(usual, others) -> bool:
    """Whether an observation is another one; the first that is ends the search.

    Each of `others` is told what is usual at its place.
    """
    is_begun = False
    for one in usual:
        try:
            other = others.send(one if is_begun else None)
        except StopIteration:
            return True
        if one != other:
            return True
        is_begun = True
    return next(others, None) is not None


USUAL = {}


def usual_of(where, beside=None):
    """What is observed with the usual options, once for all options of a function."""
    call, known = call_of(where), f"{where} {beside}"
    if known not in USUAL:
        found = call.observe(call.always | (beside or {}))
        USUAL[known] = or_refused(found) if beside else or_failed(found)
    USUAL[known], found = itertools.tee(USUAL[known])
    return found


def or_failed(observations):
    try:
        yield from observations
    except ValueError as error:  # which would pass for that of another value
        raise RuntimeError("the usual options fail") from error


def or_refused(observations):
    """Observations; without the option, the others beside it may be refused."""
    try:
        yield from observations
    except ValueError:
        yield "refused"


def explain(where, name, option) -> str:
    """Why another value of an option is taken for unread; "" if it is read."""
    call, beside = call_of(where), BESIDE.get(where, {}).get(name, {})
    always = call.always | beside
    default = always.get(name, option.default)
    values = annotations.others(option.annotation, default)
    if name in VALUES.get(where, {}):
        values = [VALUES[where][name]]
    refused = []
    if name in PATHS.get(where, ()):  # nothing lies there, which must be said
        with pytest.raises((ValueError, OSError), match="nowhere"):
            list(call.observe(always | {name: "/nowhere"}))
        return ""
    for value in itertools.islice(values, 6):
        try:
            if differ(usual_of(where, beside), call.observe(always | {name: value})):
                return ""
        except ValueError as error:
            refused.append(f"{value!r} is refused ({error})")
    return f"{name}: no other value is noticed; {'; '.join(refused[:2])}"


@pytest.mark.parametrize(
    "where", [x for x in FUNCTIONS if not x.startswith("augment images of")]
)
def test_every_option_is_read(where):
    # Without OpenCV there is one decoder.
    alone = {"decoder"} if importlib.util.find_spec("cv2") is None else set()
    unread = {
        name: explain(where, name, x)
        for name, x in options_of(where)
        if name not in alone
    }
    unseen = UNSEEN.get(where, {})
    assert not [x for name, x in unread.items() if x and name not in unseen]
    assert all(unread[name] for name in unseen), "take out of UNSEEN what is noticed"


@pytest.mark.parametrize(
    "where", ["jaxcl.methods.er", "base dino", "encoder vit", "jaxcl.evals.knn"]
)
def test_equal_options_are_observed_as_equal(where):
    """The control: nothing but the option makes a difference."""
    call = call_of(where)
    assert not differ(usual_of(where), call.observe(call.always))
