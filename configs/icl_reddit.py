"""ICL on REDDIT-BINARY: threads of discussion as graphs, old ones and new ones.

Ji et al., WSDM 2023, Table 4: the first 1 - growth of the 2000 graphs, shuffled by the
seed, then the others; nodes have their degree profile for features, and the largest
graph has 3782 of them. A GCN of two layers of 32, batches of 32, until the mean loss of
an epoch has not come lower for 50 epochs. The paper searches Adam's learning rate among
1e-3, 1e-4 and 1e-5 and does not say which it took.

  python -m jaxcl.main --config=configs/icl_reddit.py --config.data.path=REDDIT-BINARY
  python -m jaxcl.main --config=configs/icl_reddit.py:retrain \
      --config.scenario.growth=0.3 --config.data.path=data/REDDIT-BINARY

Rows: icl (the default), no_lrl, no_lrl_sgd, no_meta, no_both;
retrain, continue, finetune, replay, distill; retrain_sgd and continue_sgd, by plain SGD
at 0.03; the controls frozen and random, which learn nothing of what is new. With `:old`
the first task alone is trained, from which each row can go on:
`--config.start=runs/icl_reddit_old`.
`configs/icl_reddit.py:debug` and, say, `configs/icl_reddit.py:finetune,debug` run
in seconds, on small rings and trees.
"""

from jaxcl.config import files, recipe, shrink

icl = files.load_paper("icl")


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, icl.ROWS)
    config = icl.graphs("reddit", row, "data/REDDIT-BINARY")
    return shrink.shrink(config) if debug else config
