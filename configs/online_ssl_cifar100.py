"""Online continual self-supervised learning on Split CIFAR-100, as CLA has it.

Cignoni et al., "Continual Latent Alignment", arXiv 2507.10434, by its released code,
and CLIMB (CoLLAs 2026), which published numbers of it: 20 tasks
x 5 classes, one pass, batches of 10 with 128 replayed, three updates on each, 2,000
images in memory, ResNet-18, SGD with a constant rate. CLIMB, with SimCLR and 2,500
images, 5 seeds, linear accuracy after the last task: CLA-E 40.95, CLA-R 42.89, MinRed
43.89, the i.i.d. stream of the same budget 50.45. Ours: not measured yet.

  jaxcl data cifar100 --out=data/cifar100
  python -m jaxcl.main --config=configs/online_ssl_cifar100.py
  python -m jaxcl.main --config=configs/online_ssl_cifar100.py:cla_r --config.seed=1

What follows the colon is a key of ROWS below. `configs/online_ssl_cifar100.py:debug`
and, say, `configs/online_ssl_cifar100.py:minred,debug` run in seconds, on digits.
CLA's tuned rates and weights are not published: these are its code's defaults and,
where it has none, guesses.

Departures: those of `online_ssl`; our linear probe in place of theirs.
"""

from jaxcl.config import files, recipe, shrink

online_ssl = files.load_paper("online_ssl")
# row -> options of the method, of the memory, of the scenario. Our weight of "cassle"
# is half of CLA's, whose code has 0.1.
CASSLE = {"name": "cassle", "weight": 0.05}
ROWS = {
    "cla_e": ({"regulariser": CASSLE}, {"policy": "fifo"}, {}),
    "cla_r": (
        {"regulariser": {"name": "cla_r", "weight": 0.1}},
        {"policy": "fifo"},
        {},
    ),
    "cla_b": ({"regulariser": CASSLE, "rows": "all", "remembers": False}, {}, {}),
    "pnr": (
        {"base": {"name": "simclr"}, "regulariser": {"name": "pnr"}},
        {"policy": "fifo"},
        {},
    ),
    "replay": ({}, {"policy": "reservoir"}, {}),
    "minred": ({}, {"policy": "min_redundancy"}, {}),
    "finetune": ({"remembers": False}, {}, {}),
    # The same budget, 42 shuffled epochs in batches of 138: control of all others.
    "iid": ({"remembers": False}, {"updates": 1}, {"name": "joint", "num_tasks": 1}),
}


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, ROWS)
    method, replay, scenario = ROWS[row]
    config = online_ssl.start(f"online_ssl_{row}_cifar100")
    config.batch_size = 138 if row == "iid" else 10
    config.epochs = 42 if row == "iid" else 1
    config.data = {"name": "arrays", "path": "data/cifar100", "validation": 0.1}
    config.scenario = {"name": "class", "num_tasks": 20, "class_order": "released"}
    config.scenario.update(scenario)
    config.augment = {
        "size": 32,
        "scale": (0.2, 1.0),
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "jitter_probability": 0.8,
        "grayscale": 0.2,
        "blur": (0.0, 0.0),
        "solarize": (0.0, 0.0),
        "flip": 0.5,
        "mean": (0.5071, 0.4865, 0.4409),
        "std": (0.2673, 0.2564, 0.2762),
    }
    config.encoder = {
        "name": "resnet",
        "depth": 18,
        "stem": "cifar",
        "zero_init_residual": True,
    }
    config.replay = {"capacity": 2000, "size": 128, "updates": 3} | replay
    inner = {"base": {"name": "simsiam"}, "regulariser": {"name": "none"}}
    config.method = recipe.Sections({"name": "online_ssl"} | inner | method)
    config.evaluators.linear.update(epochs=100, train_on="all")
    config.evaluators.knn.k = 50
    config.devices = 1  # ten rows do not share out over many
    config.save_every = 1000
    return shrink.shrink(config) if debug else config
