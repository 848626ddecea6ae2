"""Faults of stored vectors: what a map costs, the order of a plan, canaries."""

from faults import fault
from faults.fault import gives, takes

_TESTS = "test_index.py::test_"

FAULTS = [
    *fault.of(
        "index.order.predict_errors",
        f"{_TESTS}the_order_puts_first_what_the_map_gets_wrong",
        ("index: the best mapped are embedded again first", gives(lambda x: 1 - x)),
    ),
    *fault.of(
        "index.maps.fit_mlp",
        "test_index_maps.py::"
        "test_a_layer_that_adds_nothing_leaves_the_linear_map[affine]",
        (
            "index: a layer forgets the shift of its map",
            gives(lambda arrays: arrays | {"shift": 0 * arrays["shift"]}),
        ),
    ),
    *fault.of(
        "index.canary.check_index",
        f"{_TESTS}a_canary_falls_silent_where_index_and_encoder_part",
        ("index: a canary asks for nothing", takes(least=lambda _: 0.0)),
        ("index: the served encoder is not compared", takes(encoder=lambda _: None)),
    ),
    *fault.of(
        "index.upgrade.list_versions",
        f"{_TESTS}a_refreshed_part_is_what_the_encoder_embeds",
        (
            "index: all vectors count as of the first version",
            gives(lambda pair: (pair[0], 0 * pair[1])),
        ),
    ),
]
