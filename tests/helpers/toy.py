"""A tiny job for tests: digits, a narrow net, seconds of work."""

import contextlib

import jax
import ml_collections
import numpy as np

from jaxcl import lookup, schema
from jaxcl.config import build
from jaxcl.data.sources import toys
from jaxcl.methods import online_ssl, two_view
from jaxcl.run import checkpoint, log_file
from jaxcl.run import job as job_lib

KEY = jax.dtypes.prng_key
# Options of the toy's method that some bases and strategies alone have.
SIZES = {"distill_hidden_dim", "predictor_hidden_dim", "memory_size", "queue_size"}
SIZES |= {"prototypes", "slices"}


# Changes to the toy for a method that replays; the method itself is to be named.
ONLINE = {
    "augment.views": 1,
    "augment.crop": False,
    "augment.flip": 0.5,
    "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.0},
    "replay": {"capacity": 64, "augment": "all"},
}


def config(**changes):
    """Two class-incremental tasks of ten steps; `changes` as {"method.base": ...}."""
    new = ml_collections.ConfigDict(
        {
            "name": "toy",
            "batch_size": 48,
            "epochs": 2,
            "data": {"name": "digits"},
            "scenario": {"name": "class", "num_tasks": 8},
            "augment": {
                "size": 8,
                "scale": (0.5, 1.0),
                "jitter": (0.4, 0.4, 0.0, 0.0),
                "grayscale": 0.0,
                "flip": 0.0,
                "mean": (0.3,),
                "std": (0.4,),
            },
            "encoder": {"name": "conv_net", "width": 4},
            "method": {
                "name": "two_view",
                "hidden_dim": 16,
                "output_dim": 8,
                "distill_hidden_dim": 16,
                "predictor_hidden_dim": 16,
                "memory_size": 24,
                "queue_size": 96,
                "prototypes": 12,
                "slices": 8,
            },
            "optimizer": {"name": "sgd", "lr": 0.3, "weight_decay": 1e-4},
            "schedule": {"name": "cosine", "per_epoch": False},
            "evaluators": {},
            "devices": 1,
            "log_every": 1,
            "save_every": 0,
            "evaluate_untrained": False,
            "plasticity": False,
            "plots": False,
            "tensorboard": False,
            "progress": False,
        }
    )
    with new.unlocked(), new.ignore_type():
        put(new, changes)
        if new.method.get("name") in ("two_view", "online_ssl"):
            _drop_sizes(new.method, changes)
    return new


def put(target, changes):
    """Set values in sections inside sections, by paths such as "method.base"."""
    for path, value in changes.items():
        *sections, last = path.replace("__", ".").split(".")
        section = target
        for name in sections:
            section = section[name]
        section[last] = value


def _drop_sizes(method, changes):
    """Leave out sizes of bases and strategies that are not the chosen ones."""
    try:
        make = online_ssl.make if method.name == "online_ssl" else two_view.make
        names = names_of_options(make, method.to_dict())
    except ValueError:  # no such base: a test of refusals
        return
    base = method.to_dict().get("base")
    if lookup.name_of(base) == "diet":  # its output has a place for each image
        del method["output_dim"]
    changed = {path.replace("__", ".") for path in changes}
    for name in set(method) & SIZES - set(names):
        if f"method.{name}" not in changed:
            del method[name]


def names_of_options(make, section):
    """Names of a method's options, and of those that its base and strategy have."""
    names = set(schema.option_of(make))
    nested = schema.nest_options(make, section, "config.method")
    for key, rule in schema.choices(make).items():
        names |= set(schema.option_of(rule.find(nested[key], key)[0]))
    return names


def job(workdir, *, tasks=None, **changes):
    """The job of `config`, perhaps of its first `tasks` tasks only."""
    work = build.build(config(**changes), workdir)
    if tasks is not None:
        work = change(
            work, stream=work.stream._replace(tasks=work.stream.tasks[:tasks])
        )
    return work


def change(work, **values):
    """The job with other values, each in the record that has the field."""
    for name in ("data", "loop", "evaluation", "logging"):
        record = getattr(work, name)
        fields = {key: values.pop(key) for key in record._fields if key in values}
        work = work._replace(**{name: record._replace(**fields)})
    assert not values, values
    return work


def unlabelled():
    """A source: the digits, of which one train row has no label."""
    data = toys.digits()
    label = data.train.label.copy()
    label[3] = -1
    return data._replace(train=data.train._replace(label=label))


def saved(work, workdir):
    """The newest checkpoint of a run directory."""
    like = job_lib.initial_state(work)
    with contextlib.closing(checkpoint.Checkpoints(workdir / "checkpoints")) as there:
        return there.restore(like)


def untimed_rows(workdir):
    """Rows of metrics.jsonl without what the clock says."""
    rows = log_file.read_rows(workdir)
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]


def check_same_bits(one, other):
    """All leaves of two states are equal."""
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def leaves(state):
    """The numbers of a state, keys included."""

    def plain(x):
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, KEY) else x

    return [plain(x) for x in jax.tree.leaves(state)]


def first_call(work):
    """The arguments of the first call of a run, the state apart."""
    task = work.stream.tasks[0]
    with contextlib.closing(job_lib.feed_batches(work, task.train, 0, 0)) as feed:
        _, batches, number = next(feed)
    return job_lib.resident(work), batches, number
