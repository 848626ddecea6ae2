"""What a config names may lie in the user's own package."""

import re
import subprocess
import sys

import numpy as np
import pytest

import jaxcl
from helpers import toy
from jaxcl import schema
from jaxcl.config import build
from jaxcl.export import command as export_command
from jaxcl.run import train

METHOD = '''
"""Fine-tuning whose loss is told louder."""

from jaxcl.methods import finetune


def make(parts, *, loudness: float = 2.0):
    method = finetune.make(parts)

    def step(state, batch):
        state, metrics = method.step(state, batch)
        return state, metrics | {"loud": loudness * metrics["loss"]}

    return method._replace(step=step)
'''
EVALUATOR = '''
"""The mean length of some rows' features."""

import numpy as np

from jaxcl import core


def make(parts, *, rows: int = 8):
    images = parts.stream.evaluation.images[:rows]

    def evaluate(state, task):
        features = np.asarray(parts.embed(state, images / 255.0))
        lengths = np.linalg.norm(features, axis=1)
        return core.Result({}, {"length": float(lengths.mean())})

    return evaluate
'''
PIECES = '''
"""A set of images, an encoder and an optimizer."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxcl import optim
from jaxcl.data import stream


def stripes(*, count: int = 96, seed: int = 0) -> stream.Dataset:
    rng, label = np.random.default_rng(seed), np.arange(count, dtype=np.int32) % 4
    images = rng.integers(0, 90, (count, 8, 8, 1), np.uint8)
    images[np.arange(count), label] = 250
    train, test = (
        stream.Examples(label[part], 0 * label[part], images[part])
        for part in (slice(16, None), slice(16))
    )
    return stream.Dataset("stripes", tuple("abcd"), ("all",), train, None, test)


class Flat(nn.Module):
    width: int
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, images, *, train=False, groups=1):
        rows = images.reshape(len(images), -1).astype(self.dtype)
        return nn.Dense(self.width, dtype=self.dtype)(rows).astype(jnp.float32)


def flat(*, width: int = 8, dtype=jnp.float32):
    return Flat(width, dtype)


def steady(*, momentum: float = 0.5):
    return optim.sgd(momentum=momentum)


number = 3
'''
MINE = toy.ONLINE | {
    "method": {"name": "open_house.method", "loudness": 3.0},
    "evaluators": {"long": {"name": "open_house.evaluator", "rows": 5}},
    "data": {"name": "open_house.pieces.stripes", "count": 112},
    "encoder": {"name": "open_house.pieces.flat", "width": 6},
    "optimizer": {"name": "open_house.pieces.steady", "lr": 0.1, "momentum": 0.0},
    "replay": {},
    "scenario.num_tasks": 2,
    "batch_size": 16,
}


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """A package beside the run, which Python finds."""
    root = tmp_path_factory.mktemp("users")
    folder = root / "open_house"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "method.py").write_text(METHOD)
    (folder / "evaluator.py").write_text(EVALUATOR)
    (folder / "pieces.py").write_text(PIECES)
    (folder / "broken.py").write_text("import a_library_that_is_not_there\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield root
    for name in [x for x in sys.modules if x.partition(".")[0] == "open_house"]:
        del sys.modules[name]


def config(**changes):
    made = toy.config(**(MINE | changes))
    del made.replay  # which fine-tuning does not read
    return made


def test_a_run_of_ones_own_pieces_trains_and_is_exported(tmp_path):
    work = build.build(config(), tmp_path / "run")
    results = train.run(work, tmp_path / "run")
    assert work.stream.dataset.name == "stripes" and len(results["task_names"]) == 2
    assert all(task["long/length"] > 0 for task in results["scalars"])
    rows = (tmp_path / "run" / "metrics.jsonl").read_text()
    loss, loud = (
        np.array([float(x) for x in re.findall(rf'"{name}": ([\d.e-]+)', rows)])
        for name in ("loss", "loud")
    )
    assert len(loss) > 4
    np.testing.assert_allclose(loud, 3 * loss, rtol=1e-3)
    export_command.export(str(tmp_path / "run"), str(tmp_path / "out"))
    images = work.stream.dataset.test.images
    assert jaxcl.load_encoder(tmp_path / "out").embed(images).shape == (16, 6)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"method": {"name": "open_house.method", "lowdness": 1.0}},
            r"config\.method\.lowdness: no such option; did you mean loudness",
        ),
        (
            {"method": {"name": "open_house.methods"}},
            r"config\.method\.name='open_house\.methods': there is no module "
            r"'open_house\.methods'; must be one that Python finds",
        ),
        ({"method": {"name": "nobodys.method"}}, "there is no module 'nobodys'"),
        ({"method": {"name": "open_house.pieces"}}, "module has no function `make`"),
        ({"method": {"name": "online"}}, r"config\.method\.name='online': allowed are"),
        (
            {"evaluators": {"long": {"name": "open_house.evaluator", "row": 1}}},
            r"config\.evaluators\.long\.row: no such option; did you mean rows",
        ),
        (
            {"encoder": {"name": "open_house.pieces.round"}},
            r"config\.encoder\.name='open_house\.pieces\.round': open_house\.pieces"
            " has no function 'round'; must be package.module.function, or one of "
            "resnet",
        ),
        ({"encoder": {"name": "open_house.pieces.number"}}, "has no function 'number'"),
        (
            {"data": {"name": "open_house.pieces.stripes", "count": "many"}},
            r"config\.data\.count='many': must be int",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        build.build(config(**changes), tmp_path / "run")


def test_what_a_module_lacks_itself_is_no_wrong_name():
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        schema.method("open_house.broken")


def test_looking_one_method_up_imports_no_other():
    code = """
import sys
from jaxcl import schema
schema.method("er"), schema.module("jaxcl.evals", "knn", "config.evaluators")
print(*(x for x in sys.modules if x.startswith(("jaxcl.methods.", "jaxcl.evals."))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    there = set(done.stdout.split())
    assert {"jaxcl.methods.er", "jaxcl.evals.knn"} <= there, done.stderr
    assert not {"jaxcl.methods.gdumb", "jaxcl.methods.icl", "jaxcl.evals.svm"} & there
