"""Faults of imported weights: names, and what no tensor shows."""

import numpy as np

from faults import fault
from faults.fault import gives, instead

_TESTS = "test_import_file.py::test_"

FAULTS = [
    *fault.of(
        "weights.wrappers.strip_name",
        f"{_TESTS}wrappers_go_wherever_they_stand",
        (
            "weights: wrappers go at the beginning of a name alone",
            instead(lambda name: name.removeprefix("module.")),
        ),
    ),
    *fault.of(
        "weights.side_files.read",
        f"{_TESTS}files_beside_the_weights_are_believed_before_the_architecture",
        (
            "weights: preprocessor_config.json is not read",
            gives(lambda facts: facts._replace(images={})),
        ),
    ),
    *fault.of(
        "weights.side_files.Facts.check",
        f"{_TESTS}numbers_that_contradict_each_other_are_refused",
        ("weights: config.json and tensors are not compared", instead(lambda *_: None)),
    ),
    *fault.of(
        "weights.encoder.Encoder.picture_features",
        f"{_TESTS}the_features_in_the_card_are_checked_when_asked",
        (
            "weights: the features in the card are no network's",
            gives(lambda rows: np.ones_like(rows)),
        ),
    ),
]
