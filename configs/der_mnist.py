"""ER, DER and DER++ on Split, Permuted and Rotated MNIST, as in the DER paper.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple
Baseline", NeurIPS 2020, with the best settings of its released code
(mammoth, tag neurips2020, utils/best_args.py): one pass, a perceptron of 784,
100, 100 and 10 units, pixels between 0 and 1, plain SGD. Split: 5 tasks of two digits
in their order, batches of 10. Permuted and rotated: 20 tasks of all digits, batches of
128.

  jaxcl convert mnist.npz data/mnist
  python -m jaxcl.main --config=configs/der_mnist.py:derpp,split,500 --config.seeds=10
  python -m jaxcl.main --config=configs/der_mnist.py:er,rotated,200

Words: er, der or derpp (the default); split (the default), permuted or rotated; how
many images the memory holds: 200 (the default), 500 or 5120.
`configs/der_mnist.py:debug` and, say, `configs/der_mnist.py:er,rotated,debug` run in
seconds, on other digits.

Departures: an incomplete last batch of a task is left out; the reservoir draws the
place of each row once, independently of the batches.
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
_WORDS = (
    ("derpp", "er", "der"),
    ("split", "permuted", "rotated"),
    ("200", "500", "5120"),
)  # of each the first is the default


def get_config(arg=None):
    method, stream, memory, debug = recipe.parse_words(arg, *_WORDS)
    lr, size, alpha, beta = _ROWS[method, stream, int(memory)]
    config = online.mnist(f"{method}_{stream}_mnist_{memory}", lr)
    config.scenario = {"name": stream, "num_tasks": 20}
    config.batch_size = 128
    if stream == "split":
        config.scenario = {"name": "class", "num_tasks": 5}
        config.batch_size = 10
    config.augment.update(mean=(0.0,), std=(1.0,))
    config.encoder = {"name": "mlp", "widths": (100, 100), "start": "glorot"}
    config.replay = {"capacity": int(memory), "size": size}
    config.method = {"name": "der", "alpha": alpha, "beta": beta}
    if method == "er":
        config.method = {"name": "er", "passes": "joint", "replay_from": "all"}
    return shrink.shrink(config) if debug else config
