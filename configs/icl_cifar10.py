"""ICL on some classes of CIFAR-10: an image encoder meets new images of them.

The image experiment of Ji et al., WSDM 2023, Section 5, on a set that they did not use:
the first 1 - growth of the images, shuffled by the seed, then the others; batches of
32, until the mean loss of an epoch has not come lower for 50 epochs. `scenario.classes`
names the classes, two or more.

  jaxcl data cifar10 --out=data/cifar10
  python -m jaxcl.main --config=configs/icl_cifar10.py:small
  python -m jaxcl.main --config=configs/icl_cifar10.py:retrain,small \
      --config.scenario.growth=0.3 --config.seeds=5

Rows: icl (the default), no_lrl, no_lrl_sgd, no_meta, no_both;
retrain, continue, finetune, replay, distill; retrain_sgd and continue_sgd, by plain SGD
at 0.03; the controls frozen and random, which learn nothing of what is new. With `:old`
the first task alone is trained, from which each row can go on:
`--config.start=runs/icl_cifar10_old`. The word `small` shrinks each for a CPU core,
to minutes: 16 pixels, three convolutions, 500 images of each class.
`configs/icl_cifar10.py:debug` and, say, `configs/icl_cifar10.py:finetune,debug` run in
seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

icl = files.load_paper("icl")


def get_config(arg=None):
    row, small, debug = recipe.parse_words(arg, icl.ROWS, ("", "small"))
    config = icl.images("cifar10", row, 16 if small else 32, stem="cifar")
    config.data = {"name": "arrays", "path": "data/cifar10"}
    config.scenario.classes = ("airplane", "ship")
    config.augment.update(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    if small:
        config.scenario.per_class = 500
        config.encoder = {"name": "conv_net", "width": 16}
        config.save_every = 0  # steps; a run takes minutes
    return shrink.shrink(config) if debug else config
