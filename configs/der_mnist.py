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

Words: er, der, derpp (the default), gem, agem or finetune, which has no memory; split
(the default), permuted or rotated; how many images the memory holds: 200 (the default),
500 or 5120. `configs/der_mnist.py:debug` and, say,
`configs/der_mnist.py:er,rotated,debug` run in seconds, on other digits.

Departures: an incomplete last batch of a task is left out; the reservoir draws the
place of each row once, independently of the batches; GEM and A-GEM store the last
images of each task, where the code draws them.
"""

from jaxcl.config import files, recipe, shrink

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
# (method, stream) -> learning rate with 200, 500 and 5,120 images
_RATES = {
    ("finetune", "split"): (0.03, 0.03, 0.03),
    ("finetune", "permuted"): (0.2, 0.2, 0.2),
    ("finetune", "rotated"): (0.2, 0.2, 0.2),
    ("agem", "split"): (0.1, 0.1, 0.1),
    ("agem", "permuted"): (0.1, 0.1, 0.1),
    ("agem", "rotated"): (0.1, 0.3, 0.3),
    ("gem", "split"): (0.01, 0.03, 0.1),
    ("gem", "permuted"): (0.1, 0.1, 0.1),
    ("gem", "rotated"): (0.01, 0.01, 0.01),
}
_MARGINS = {"split": (1.0, 0.5, 1.0), "permuted": (0.5,) * 3, "rotated": (0.5,) * 3}
_WORDS = (
    ("derpp", "er", "der", "gem", "agem", "finetune"),
    ("split", "permuted", "rotated"),
    ("200", "500", "5120"),
)  # of each the first is the default


def get_config(arg=None):
    method, stream, memory, debug = recipe.parse_words(arg, *_WORDS)
    at, capacity = _WORDS[2].index(memory), int(memory)
    is_split = stream == "split"
    num_tasks = 5 if is_split else 20
    if method in ("er", "der", "derpp"):
        lr, size, alpha, beta = _ROWS[method, stream, capacity]
    else:
        lr, size = _RATES[method, stream][at], 128
    config = online.mnist(f"{method}_{stream}_mnist_{memory}", lr)
    config.scenario = {"name": "class" if is_split else stream, "num_tasks": num_tasks}
    config.batch_size = 10 if is_split else 128
    config.augment.update(mean=(0.0,), std=(1.0,))
    config.encoder = {"name": "mlp", "widths": (100, 100), "start": "glorot"}
    config.replay = {"capacity": capacity, "size": size}
    if method == "finetune":
        config.name, config.replay = f"finetune_{stream}_mnist", {}
        config.method = {"name": "finetune"}
    elif method == "er":
        config.method = {"name": "er", "passes": "joint", "replay_from": "all"}
    elif method in ("der", "derpp"):
        config.method = {"name": "der", "alpha": alpha, "beta": beta}
    else:
        each = capacity // num_tasks
        config.replay.update(capacity=each * num_tasks, policy="task_ring")
        config.method = {"name": method}
    if method == "gem":
        margin = _MARGINS[stream][at]
        config.method = {"name": "gem", "form": "code", "memory_rows": each}
        config.method.margin = margin
    return shrink.shrink(config) if debug else config
