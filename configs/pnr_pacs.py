"""PNR and baselines on PACS, domain-incremental, on a laptop.

photo, art_painting, cartoon, sketch: the domain-incremental scenario of the PNR paper
(Cha et al., ICML 2024, Table 4, there on DomainNet) at a budget of two minutes a run on
one CPU core: three convolutions of width 16 on 24 pixels, 12 epochs a task. The paper
has no scores for it; ours are in docs/paper_pnr.md.

The data: an .npz file with x u8[N,H,W,3], y, domain, is_test, class_names and
domain_names (docs/data.md).
  python -m jaxcl.main --config=configs/pnr_pacs.py --config.data.path=pacs64.npz
  python -m jaxcl.main --config=configs/pnr_pacs.py --config.data.path=pacs64.npz \
      --workdir=runs/pacs_byol --config.method.base=byol

`config.method.base` brings its own learning rates and augmentation with it.
`configs/pnr_pacs.py:debug` runs the same code in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

pnr = files.load_paper("pnr")


def get_config(arg=None):
    (debug,) = recipe.parse_words(arg)
    lambdas = {"": 1.0, "vicreg": 8.0, "lejepa": 0.32}
    config, base = pnr.small("pnr_pacs", 24, lambdas)
    config.precision = "auto"
    config.epochs = 12
    config.data = {"name": "npz", "path": "data/pacs64.npz"}
    config.scenario = {"name": "domain"}
    config.augment.update(mean=(0.485, 0.456, 0.406), std=(0.228, 0.224, 0.225))
    rates = {"": 0.2, "mocov2plus": 0.3, "byol": 0.3}
    config.optimizer = {
        "name": "lars",
        "lr": recipe.look_up(rates, base),
        "weight_decay": recipe.look_up({"": 1e-4, "byol": 1e-5}, base),
    }
    config.evaluators.linear.update(epochs=100, batch_size=128)
    return shrink.shrink(config) if debug else config
