"""Online class-incremental learning on Split CIFAR-100: ER-ACE and all baselines.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021,
Fig. 5 (left): 20 tasks x 5 classes, one pass, batches of 10 with 10 replayed, 100
images per class in memory, reduced ResNet-18, no augmentation. The paper gives no
numbers (a figure): ER-ACE and ER-AML come close to iid++. The later state of its code
has, on validation data, ER-ACE 24.6, ER 17.5, MIR 19.1, iid 19.2, iid++ 27.6. Ours: not
run in full.

  jaxcl data cifar100 --out=data/cifar100
  python -m jaxcl.main --config=configs/er_ace_cifar100.py
  python -m jaxcl.main --config=configs/er_ace_cifar100.py:er_aml --config.seeds=3

Rows of the table: er_ace (the default) and the other keys of
METHODS below. Classes come in the order of their number, as in the released code; a
random one is --config.scenario.class_order=shuffled.
`configs/er_ace_cifar100.py:debug` and, say, `configs/er_ace_cifar100.py:mir,debug` run
in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

online = files.load_paper("online")
METHODS = online.ER_ACE | {
    "aser": ({"name": "aser", "per_class": 2}, 0.1, {}),
    "ss_il": ({"name": "ss_il"}, 0.1, {}),
}


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, METHODS)
    config = online.er_ace(
        "cifar100", METHODS, row, size=32, num_tasks=20, per_class=100
    )
    config.data = {"name": "arrays", "path": "data/cifar100", "validation": 0.05}
    return shrink.shrink(config) if debug else config
