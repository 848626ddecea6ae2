"""Online class-incremental learning on Split CIFAR-10: ER-ACE and all baselines.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021, Table
2: 5 tasks x 2 classes, one pass, batches of 10 with 10 replayed, reduced ResNet-18, no
augmentation. Paper, final accuracy with a memory of 5, 20, 50, 100 images per class:
iid 60.8; iid++ 72.0; iid offline 79.2; fine-tuning 18.4; GEM -, 16.8, 17.1, 17.5; iCaRL
24.7, 28.5, 29.7, 30.3; ER 19.0, 26.7, 36.1, 41.5; MIR -, 29.8, 40.0, 47.6; ASER, mu -,
26.4, 36.3, 43.5; ER-AML 33.0, 40.1, 46.0, 49.8; ER-ACE 35.3, 43.7, 48.0, 50.9; ER + Aug
25.5, 41.4, 46.1, 47.6; ER-ACE + Aug 42.3, 48.6, 52.4, 55.7; the same, 3 iter 44.1,
51.6, 59.6, 64.4; GDumb 25.8, 35.0, 45.8, 61.3. Ours: docs/paper_er_ace.md, about
10 minutes a run on one CPU core.

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/er_ace_cifar10.py
  python -m jaxcl.main --config=configs/er_ace_cifar10.py:mir \
      --config.replay.per_class=100 --config.seeds=3

Rows of the table: er_ace (the default) and the other keys of
METHODS below. "+Aug" are the rows er_aug and er_ace_aug, at the rate 0.01 of the
authors' search; "3 iter" is --config.replay.updates=3.
`configs/er_ace_cifar10.py:debug` and, say, `configs/er_ace_cifar10.py:mir,debug` run in
seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

online = files.load_paper("online")
METHODS = online.ER_ACE | {
    "er_aml": ({"name": "er_aml"}, 0.05, {}),
}
METHODS["derpp"][0]["alpha"] = METHODS["derpp_ace"][0]["alpha"] = 0.75


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, METHODS)
    config = online.er_ace("cifar10", METHODS, row, size=32, num_tasks=5, per_class=20)
    config.data = {"name": "arrays", "path": "data/cifar10", "validation": 0.05}
    return shrink.shrink(config) if debug else config
