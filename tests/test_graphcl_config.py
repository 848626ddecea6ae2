"""The config of GraphCL: its published protocol, and a shrunk run of it."""

import numpy as np
import pytest
from absl import flags

from helpers import config_files
from jaxcl.config import build, sections
from jaxcl.nets import gcn, gin
from jaxcl.run import record, results, train


@pytest.mark.parametrize("name", ["mutag", "proteins", "reddit"])
def test_it_is_the_published_protocol(name):
    top = sections.top_of(config_files.take("graphcl", name).to_dict())
    parts, _ = sections.parts(top)
    assert isinstance(parts.encoder, gin.GIN)
    assert (parts.encoder.layers, parts.encoder.num_features) == (3, 96)
    assert (top.epochs, top.batch_size, top.scale_lr) == (20, 128, False)
    assert top.optimizer == {"name": "adam", "lr": 0.01}
    method = top.method
    assert (method["temperature"], method["with_positive"]) == (0.2, False)
    assert (method["projector"], method["anchors"]) == (96, "original")
    assert top.evaluators["svm"]["folds"] == 10
    assert top.data["features"] == ("labels",)
    assert top.name == ("graphcl" if name == "mutag" else f"graphcl_{name}")
    assert sections.method(top, parts).objective is not None


def test_the_other_encoder_is_a_word():
    top = sections.top_of(config_files.take("graphcl", "proteins,gcn").to_dict())
    parts, _ = sections.parts(top)
    assert isinstance(parts.encoder, gcn.GCN) and top.name == "graphcl_proteins_gcn"
    assert top.method["projector"] == parts.encoder.num_features == 64


@pytest.mark.parametrize("argument", ["imdb", "mutag,proteins", "mutag,gin"])
def test_refuses_words_that_there_are_not(argument):
    said = f"'{argument}': '.*; allowed are, with commas between, one of mutag, prot"
    with pytest.raises(flags.Error, match=said):
        config_files.take("graphcl", argument)


def test_a_shrunk_run_has_its_untrained_control(tmp_path):
    config = config_files.take("graphcl", "debug")
    work = build.build(config, tmp_path)
    found = train.run(work, tmp_path)
    assert results.finished(found) == 1
    scores = {
        row["step"]: row["eval"]["svm/all"]
        for row in record.read_rows(tmp_path)
        if "svm/all" in row.get("eval", {})
    }
    # Before the first step, and at the end: 96 graphs are three batches of 32.
    assert {*scores} == {0, 3}
    assert scores[3] == found["scalars"][0]["svm/all"]
    assert np.isfinite([*scores.values()]).all()
