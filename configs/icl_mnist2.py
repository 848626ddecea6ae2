"""ICL on two digits of MNIST: an image encoder meets new images of both.

Ji et al., WSDM 2023, Table 3: the first 1 - growth of the images, shuffled by the seed,
then the others; batches of 32, until the mean loss of an epoch has not come lower for
50 epochs. The paper names neither the digits nor the learning rate, which it searches
among 1e-3, 1e-4 and 1e-5; it enlarges the images to 224 pixels of three channels.
Paper, Table 3, times sooner than retraining in seconds / epochs at growth 0.3, 0.5,
0.7: finetune 12.3 / 3.6, 5.5 / 2.6, 3.8 / 2.7; replay 2.8 / 2.6, 3.5 / 2.5, 3.2 / 2.4;
distill 7.8 / 3.0, 4.4 / 2.8, 3.1 / 2.2; icl 14.2 / 10.6, 16.7 / 12.7, 6.4 / 7.1; no_lrl
1.0 / 1.0, 2.4 / 2.5, 1.5 / 2.3; no_meta 1.1 / 1.3, 1.2 / 1.5, 1.0 / 1.2; no_both 1.7 /
1.7, 1.3 / 1.3, 1.2 / 1.3.

  jaxcl data mnist --out=data/mnist
  python -m jaxcl.main --config=configs/icl_mnist2.py:small
  python -m jaxcl.main --config=configs/icl_mnist2.py:retrain,small \
      --config.scenario.growth=0.3 --config.seeds=5

Rows: icl (the default), no_lrl, no_lrl_sgd, no_meta, no_both;
retrain, continue, finetune, replay, distill; retrain_sgd and continue_sgd, by plain SGD
at 0.03; the controls frozen and random, which learn nothing of what is new. With `:old`
the first task alone is trained, from which each row can go on:
`--config.start=runs/icl_mnist2_old`. The word `small` shrinks each for a CPU core,
to minutes: 28 pixels, three convolutions, 500 images of each digit.
`configs/icl_mnist2.py:debug` and, say, `configs/icl_mnist2.py:finetune,debug` run in
seconds, on other digits.
"""

from jaxcl.config import files, recipe, shrink

icl = files.load_paper("icl")


def get_config(arg=None):
    row, small, debug = recipe.parse_words(arg, icl.ROWS, ("", "small"))
    config = icl.images("mnist2", row, 28 if small else 224)
    config.data = {"name": "arrays", "path": "data/mnist"}
    config.scenario.classes = (3, 8)
    config.augment.update(blur=0.0 if small else 0.5, mean=(0.1307,), std=(0.3081,))
    config.method.output_dim = 1000
    if small:
        config.scenario.per_class = 500
        config.encoder = {"name": "conv_net", "width": 16}
        config.method.output_dim = 0
        config.save_every = 0  # steps; a run takes minutes
    return shrink.shrink(config) if debug else config
