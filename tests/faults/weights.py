"""Faults of weights and their features: names, files of features, adapters."""

import jax.numpy as jnp
import numpy as np

from faults import fault
from faults.fault import gives, instead, takes

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
        "weights.side_files.read_folder",
        f"{_TESTS}files_beside_the_weights_are_believed_before_the_architecture",
        (
            "weights: preprocessor_config.json is not read",
            gives(lambda facts: facts._replace(images={})),
        ),
    ),
    *fault.of(
        "weights.side_files.read_folder",
        f"{_TESTS}numbers_that_contradict_each_other_are_refused",
        (
            "weights: config.json and what is published are not compared",
            gives(lambda facts: facts._replace(network={})),
        ),
    ),
    *fault.of(
        "weights.encoder.Encoder.picture_features",
        f"{_TESTS}the_features_in_the_card_are_checked_when_asked",
        (
            "weights: the features in the card are no network's",
            gives(lambda rows: np.ones_like(rows)),
        ),
    ),
    *fault.of(
        "weights.embed._count_whole_batches",
        "test_embed.py::test_a_command_that_was_cut_goes_on_to_the_same_file",
        ("features: a cut command begins anew", instead(lambda *_: 0)),
        (
            "features: half a batch counts as whole",
            instead(lambda rows, sizes, batch_size: rows),
        ),
    ),
    *fault.of(
        "index.maps.fit_affine",
        "test_index_maps.py::test_the_affine_map_is_the_ridge_regression_of_float64",
        ("maps: no ridge", takes(ridge=lambda _: 0.0)),
        ("maps: one rank too many", takes(rank=lambda rank: rank and rank + 1)),
        (
            "maps: no shift",
            gives(lambda made: made | {"shift": 0 * made["shift"]}),
        ),
    ),
    *fault.of(
        "methods.linear_head.descend",
        "test_frozen.py::test_scores_are_those_of_float64[linear_head]",
        ("linear head: unmet classes compete", takes(seen=jnp.ones_like)),
    ),
]
