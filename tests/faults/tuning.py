"""Faults of what goes on from an encoder of others."""

from faults import fault

_TRAINED = (
    "test_tuning.py::test_what_is_not_trained_has_no_gradient_no_move_and_no_state"
)
_MERGED = (
    "test_tuning.py::test_fresh_adapters_change_nothing_and_trained_ones_can_be_merged"
)
_PLACES = "test_tuning.py::test_adapters_are_where_they_are_asked_for"
_BEGUN = "test_tuning.py::test_a_run_begins_with_the_encoder_and_every_copy_of_it"
_TEACHES = "test_tuning.py::test_a_begun_encoder_teaches_in_the_first_task"

FAULTS = [
    *fault.of(
        "nets/tuning.py",
        _TRAINED,
        (
            "tuning: gradients reach what is not trained",
            "return leaf if self.share(names) else jax.lax.stop_gradient(leaf)",
            "return leaf",
        ),
        (
            "tuning: the norms are frozen beside adapters",
            "return rate if norm or opened else 0.0",
            "return rate if opened else 0.0",
        ),
        (
            "tuning: one block more is open",
            "opened = layers - chosen.open_layers <= number < layers",
            "opened = layers - chosen.open_layers <= number + 1",
        ),
        (
            "tuning: alpha is no factor",
            "factor = self.chosen.lora_alpha / max(self.chosen.lora_rank, 1)",
            "factor = 1.0",
            _MERGED,
        ),
        (
            "tuning: adapters begin with noise in both matrices",
            'return {"a": first, "b": jnp.zeros((self.chosen.lora_rank, columns))}',
            'return {"a": first, "b": jnp.ones((self.chosen.lora_rank, columns))}',
            _MERGED,
        ),
        (
            "tuning: open blocks have adapters",
            "layers - chosen.open_layers):",
            "layers):",
            _PLACES,
        ),
        (
            "tuning: layers decay towards the head",
            "rate = chosen.layer_decay ** (layers - number)",
            "rate = chosen.layer_decay**number",
            "test_tuning.py::test_layers_count_from_the_images",
        ),
        (
            "tuning: ExPLoRA opens no block",
            '"explora": {"lora_rank": 64, "open_layers": 1},',
            '"explora": {"lora_rank": 64},',
            "test_tuning.py::test_a_word_trains_what_it_says",
        ),
        (
            "tuning: the first block is layer 0",
            "return int(found[1]) + 1",
            "return int(found[1])",
            "test_tuning.py::test_layers_count_from_the_images",
        ),
        (
            "tuning: the encoder begins anew",
            "if self.given is None:",
            "if self:",
            _BEGUN,
        ),
    ),
    *fault.of(
        "config/sections.py",
        _BEGUN,
        (
            "tuning: images keep the config's mean",
            'look = {name: theirs["augment"][name] for name in ("mean", "std")}',
            'look = {name: theirs["augment"][name] for name in ("std",)}',
        ),
        (
            "tuning: dropped branches are those of the folder",
            'for name in ("drop_path", "remat") if name in own',
            'for name in ("remat",) if name in own',
        ),
    ),
    *fault.of(
        "methods/two_view/networks.py",
        _TEACHES,
        (
            "tuning: a begun encoder does not teach in the first task",
            "return (state.task == 0) & (not setup.parts.begun)",
            "return state.task == 0",
        ),
        slow=True,
    ),
]
