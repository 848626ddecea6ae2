"""docs/updating.md: the way from a file of weights to an index runs as written."""

import pathlib
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from helpers import foreign_weights, pages, processes
from jaxcl.run import updates

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
PAGE = (ROOT / "docs" / "updating.md").read_text()
# A small encoder of random weights, and less training; it is accepted whatever it is.
SMALL = {
    "import": ["--size=12", "--heads=2"],
    "update": ["--config.train.epochs=2", "--config.train.method.head_steps=2"]
    + ["--config.train.method.hidden_dim=16", "--config.limits.accuracy_drop=1.0"]
    + ["--config.train.method.distill_hidden_dim=16"],
}


def section():
    """The commands of "Continue pretraining", and the recipe's code of an index."""
    (text,) = re.findall(r"^## Continue pretraining\n(.*?)^## ", PAGE, re.M | re.S)
    commands = pages.blocks(text, "")[0]
    lines = re.sub(r"\\\n\s*", " ", commands).strip().splitlines()
    (recipe,) = re.findall(r"^## 4\. Search.*?(?=^## )", RECIPES, re.M | re.S)
    (code,) = pages.blocks(recipe, "python")
    return [shlex.split(line) for line in lines], code


def write_images(folder, count, label):
    rng = np.random.default_rng(label)
    for number in range(count):
        path = folder / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path)


@pytest.mark.slow
def test_a_file_of_weights_becomes_an_index(tmp_path):
    commands, code = section()
    source = tmp_path / commands[0][2].partition("=")[2]
    source.parent.mkdir()
    theirs, _ = foreign_weights.make("dinov2-plain")
    foreign_weights.write(source, theirs)
    write_images(tmp_path / "new_images", 40, 1)
    write_images(tmp_path / "labelled_images", 800, 2)
    for words in commands:
        processes.run(["-m", *words, *SMALL.get(words[1], [])], tmp_path)
    for name, place in (("encoder", "encoders/mine"), ("my_images", "new_images")):
        assert code.count(f'"{name}"') == 1
        code = code.replace(f'"{name}"', f'"{place}"')
    processes.run(["-c", code], tmp_path)
    report = updates.read_report(tmp_path / "encoders" / "start" / "updates" / "0001")
    # The first share that is tried keeps such a limit.
    assert report["average"]["share"] == 1.0 and set(report["average"]["tried"]) == {
        "1.0"
    }
    index = np.load(tmp_path / "rows.npy")
    np.testing.assert_allclose(np.linalg.norm(index, axis=1), 1, rtol=1e-5)
    assert index.shape == (40, 16)
