"""Class-incremental learning on Seq-CIFAR-100: CCLIS, variants and baselines.

Li et al., "Contrastive Continual Learning with Importance Sampling and
Prototype-Instance Relation Distillation", AAAI 2024, Table 1: 5 tasks x 20 classes,
500 epochs on the first task and 100 on each other, batches of 512, ResNet-18; methods
with a classifier 50 epochs a task, batches of 32 with 32 replayed. Paper, final
accuracy over all classes / within the task with a memory of 200 and of 500: CCLIS
42.4 / 72.9 and 46.1 / 74.5, GCR 33.7 / 64.2 and 45.9 / 71.6, DER 31.2 / 63.1 and 41.4 /
71.7, iCaRL 28.0 / 51.4 and 33.3 / 58.2, Co2L 27.7 / 54.3 and 36.4 / 62.0, ER 21.8 /
60.2 and 27.7 / 66.2, GEM 20.8 / 58.8 and 25.5 / 66.3, GSS 19.4 / 55.4 and 21.9 / 60.3.
Ours: not run at this size.

The released code weighs every negative here and keeps a term of a row's own class in
its score, both by mistake: the row `released`, most likely that of the paper's numbers.

  python -m jaxcl.main --config=configs/cclis_cifar100.py --config.data.path=PATH
  python -m jaxcl.main --config=configs/cclis_cifar100.py:er \
      --config.data.path=PATH --config.replay.capacity=500

PATH holds what `jaxcl convert cifar100.npz PATH` writes. Rows: cclis
(the default) and the other keys of CONTRASTIVE and REPLAY
of configs/papers/cclis.py. `configs/cclis_cifar100.py:debug` and, say,
`configs/cclis_cifar100.py:co2l,debug` run in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

cclis = files.load_paper("cclis")


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, cclis.ROWS)
    config = cclis.full(f"{row}_cifar100", row)
    config.data = {"name": "arrays", "path": "data/cifar100"}
    config.augment.update(
        size=32, mean=(0.5153, 0.4961, 0.4497), std=(0.2608, 0.2551, 0.2779)
    )
    if row in cclis.CONTRASTIVE:
        config.evaluators.linear.lr = 0.1
    return shrink.shrink(config) if debug else config
