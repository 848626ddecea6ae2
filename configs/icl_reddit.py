"""ICL on REDDIT-BINARY: threads of discussion as graphs, old ones and new ones.

Ji et al., WSDM 2023, Table 4: the first 1 - growth of the 2000 graphs, shuffled by the
seed, then the others; nodes have their degree profile for features, and the largest
graph has 3782 of them. A GCN of two layers of 32, batches of 32, until the mean loss of
an epoch has not come lower for 50 epochs. The paper searches Adam's learning rate among
1e-3, 1e-4 and 1e-5 and does not say which it took.
Paper, Table 4, times sooner than retraining in seconds / epochs at growth 0.3, 0.5,
0.7: finetune 14.4 / 1.1, 5.5 / 2.9, 1.2 / 0.9; replay 2.9 / 2.1, 2.0 / 1.4, 1.3 / 1.1;
distill 2.4 / 1.5, 2.7 / 1.6, 1.1 / 0.9; icl 2.7 / 2.5, 2.9 / 3.1, 2.3 / 3.2; no_lrl 3.4
/ 3.3, 2.7 / 2.9, 2.6 / 3.6; no_meta 3.0 / 3.2, 1.4 / 1.6, 1.2 / 1.3; no_both 5.9 / 5.8,
2.2 / 2.4, 2.5 / 2.5.

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
