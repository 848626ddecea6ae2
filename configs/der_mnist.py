"""ER, DER, DER++, GEM and A-GEM on three MNIST streams, as in the DER paper.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple
Baseline", NeurIPS 2020, with the best settings of its released code
(mammoth, tag neurips2020, utils/best_args.py): one pass, a perceptron of 784,
100, 100 and 10 units, pixels between 0 and 1, plain SGD. Split: 5 tasks of two digits
in their order, batches of 10. Permuted and rotated: 20 tasks of all digits, batches of
128.

  jaxcl convert mnist.npz data/mnist
  python -m jaxcl.main --config=configs/der_mnist.py:derpp,split,500 --config.seeds=10
  python -m jaxcl.main --config=configs/der_mnist.py:er,rotated,200

Words: er, der, derpp (the default), gem, agem or finetune; split (the default),
permuted or rotated; how many images the memory holds: 200 (the default), 500 or 5120,
none with finetune. `configs/der_mnist.py:debug` and, say,
`configs/der_mnist.py:er,rotated,debug` run in seconds, on other digits.

Departures: an incomplete last batch of a task is left out; the reservoir draws the
place of each row once, independently of the batches; GEM and A-GEM store the last
images of each task, where the code draws them.
"""

from jaxcl.config import files, recipe, shrink
from jaxcl.errors import Refused

online = files.load_paper("online")

# (method, stream, memory) -> learning rate, rows replayed, alpha, beta
_ROWS = {
    ("er", "split", 200): (0.01, 10, 0, 0),
    ("er", "split", 500): (0.1, 10, 0, 0),
    ("er", "split", 5120): (0.1, 10, 0, 0),
    ("der", "split", 200): (0.03, 10, 0.2, 0),
    ("der", "split", 500): (0.03, 128, 1.0, 0),
    ("der", "split", 5120): (0.1, 128, 0.5, 0),
    ("derpp", "split", 200): (0.03, 128, 0.2, 1.0),
    ("derpp", "split", 500): (0.03, 10, 1.0, 0.5),
    ("derpp", "split", 5120): (0.1, 64, 0.2, 0.5),
    ("er", "permuted", 200): (0.2, 128, 0, 0),
    ("er", "permuted", 500): (0.2, 128, 0, 0),
    ("er", "permuted", 5120): (0.2, 128, 0, 0),
    ("der", "permuted", 200): (0.2, 128, 1.0, 0),
    ("der", "permuted", 500): (0.2, 128, 1.0, 0),
    ("der", "permuted", 5120): (0.2, 128, 0.5, 0),
    ("derpp", "permuted", 200): (0.1, 128, 1.0, 1.0),
    ("derpp", "permuted", 500): (0.2, 128, 1.0, 0.5),
    ("derpp", "permuted", 5120): (0.2, 128, 0.5, 1.0),
    ("er", "rotated", 200): (0.2, 128, 0, 0),
    ("er", "rotated", 500): (0.2, 128, 0, 0),
    ("er", "rotated", 5120): (0.2, 128, 0, 0),
    ("der", "rotated", 200): (0.2, 128, 1.0, 0),
    ("der", "rotated", 500): (0.2, 128, 0.5, 0),
    ("der", "rotated", 5120): (0.2, 128, 0.5, 0),
    ("derpp", "rotated", 200): (0.1, 128, 1.0, 0.5),
    ("derpp", "rotated", 500): (0.2, 128, 0.5, 1.0),
    ("derpp", "rotated", 5120): (0.2, 128, 0.5, 0.5),
}
# (method, stream) -> learning rates with 200, 500 and 5,120 images
_RATES = {
    ("agem", "split"): (0.1, 0.1, 0.1),
    ("agem", "permuted"): (0.1, 0.1, 0.1),
    ("agem", "rotated"): (0.1, 0.3, 0.3),
    ("gem", "split"): (0.01, 0.03, 0.1),
    ("gem", "permuted"): (0.1, 0.1, 0.1),
    ("gem", "rotated"): (0.01, 0.01, 0.01),
}
_MARGINS = {"split": (1.0, 0.5, 1.0), "permuted": (0.5,) * 3, "rotated": (0.5,) * 3}
_FINETUNE_RATE = {"split": 0.03, "permuted": 0.2, "rotated": 0.2}
_SIZES = ("200", "500", "5120")
_WORDS = (
    ("derpp", "er", "der", "gem", "agem", "finetune"),
    ("split", "permuted", "rotated"),
    ("", *_SIZES),
)  # of each the first is the default; "" is 200


def get_config(arg=None):
    method, stream, memory, debug = recipe.parse_words(arg, *_WORDS)
    num_tasks = 5 if stream == "split" else 20
    if method == "finetune":
        if memory:
            raise Refused(f"{arg!r}: finetune has no memory; leave out {memory!r}")
        lr, replay, options = _FINETUNE_RATE[stream], {}, {"name": "finetune"}
    else:
        memory = memory or _SIZES[0]
        lr, replay, options = _choose(method, stream, memory, num_tasks)
    config = online.mnist("_".join(filter(None, (method, stream, "mnist", memory))), lr)
    config.scenario = {"name": stream, "num_tasks": num_tasks}
    config.batch_size = 128
    if stream == "split":
        config.scenario.name, config.batch_size = "class", 10
    config.augment.update(mean=(0.0,), std=(1.0,))
    config.encoder = {"name": "mlp", "widths": (100, 100), "start": "glorot"}
    config.replay, config.method = replay, options
    return shrink.shrink(config) if debug else config


def _choose(method, stream, memory, num_tasks):
    """Return the learning rate, and the sections replay and method."""
    capacity, at = int(memory), _SIZES.index(memory)
    if method in ("gem", "agem"):
        options = {"name": method}
        if method == "gem":
            options |= {"form": "code", "margin": _MARGINS[stream][at]}
            options["memory_rows"] = capacity // num_tasks  # all of a task
        replay = {"capacity": capacity, "size": 128, "policy": "task_ring"}
        return _RATES[method, stream][at], replay, options
    lr, size, alpha, beta = _ROWS[method, stream, capacity]
    options = {"name": "der", "alpha": alpha, "beta": beta}
    if method == "er":
        options = {"name": "er", "passes": "joint", "replay_from": "all"}
    return lr, {"capacity": capacity, "size": size}, options
