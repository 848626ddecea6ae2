"""ICL on PROTEINS: a graph encoder that has learnt old graphs meets new ones.

Ji et al., WSDM 2023, Table 4 and Figure 4: the first 1 - growth of the 1113 graphs,
shuffled by the seed, then the others; a GCN of two layers of 32, batches of 32, until
the mean loss of an epoch has not come lower for 50 epochs. The paper searches Adam's
learning rate among 1e-3, 1e-4 and 1e-5 and does not say which it took.

  python -m jaxcl.main --config=configs/icl_proteins.py --config.data.path=proteins.npz
  python -m jaxcl.main --config=configs/icl_proteins.py:retrain \
      --config.scenario.growth=0.3 --config.seeds=5 --config.data.path=data/PROTEINS

Rows: icl (what the name of the file alone means), no_lrl, no_lrl_sgd, no_meta, no_both;
retrain, continue, finetune, replay, distill; the controls frozen and random, which
learn nothing of what is new. With `:old` the first task alone is trained, from which
each row can go on: `--config.start=runs/icl_proteins_old`.
`configs/icl_proteins.py:debug` and, say, `configs/icl_proteins.py:finetune,debug` run
in seconds, on small rings and trees.
"""

import ml_collections

from jaxcl.config import recipe, shrink
from jaxcl.methods import icl


def get_config(arg=None):
    row, debug = recipe.words(arg, (*icl.VARIANTS, "old"))
    config = ml_collections.ConfigDict()
    config.name = "icl_proteins"
    if row != "icl":
        config.name += f"_{row}"
    config.seeds = 1  # how many runs, from `seed` on
    config.seed = 0
    # A file with the arrays of docs/data.md, or a folder in TUDataset's format.
    config.data = {"name": "graphs", "path": "data/PROTEINS"}
    config.scenario = {"name": "growth", "growth": 0.5, "evaluation": "none"}
    config.augment = {"name": "graphs"}
    config.encoder = {"name": "gcn"}
    config.method = {"name": "icl", **icl.VARIANTS.get(row, {})}
    config.epochs = 1000  # at most
    config.patience = 50
    config.batch_size = 32
    config.scale_lr = False
    config.optimizer = {"name": "adam", "lr": 1e-3, "weight_decay": 1e-5}
    config.schedule = {"name": "constant"}
    config.evaluators = {"objective": {}, "svm": {"last_only": True}}
    config.evaluators.collapse = {}
    config.eval_epochs = 1
    config.evaluate_untrained = False
    config.plasticity = False
    config.save_every = 0  # steps; a run takes minutes
    if row == "old":
        config.first_tasks = 1
    return shrink.shrink(config) if debug else config
