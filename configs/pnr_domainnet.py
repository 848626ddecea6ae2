"""PNR and baselines on DomainNet, domain-incremental (Cha et al., ICML 2024, Table 4).

6 tasks, real to clipart, each with the same 345 classes; ResNet-18, 200 epochs a task,
3 seeds. Paper, A_6, domain-aware, the mean of six probes on one domain each:

              MoCo    SimCLR  Barlow  BYOL    VICReg
  joint       48.20   48.50   49.50   53.80   52.12

The cells of finetune, cassle and pnr could not be read in our copy of the paper.
Ours: not run; DomainNet was not available. Cost: 6 tasks x 200
epochs x 130 to 472 steps of 2 x 256 images of 224 pixels, 319,400 steps in all, and 200
epochs of forward passes over all 409,832 images for the probes.

The data, folders and lists as docs/data_sets.md has them:

  python -m jaxcl.main --config=configs/pnr_domainnet.py \
      --config.data.path=data/domainnet --workdir=runs/dn_mocov2plus_pnr
  python -m jaxcl.main --config=configs/pnr_domainnet.py \
      --config.method.base=byol --config.method.strategy=cassle \
      --workdir=runs/dn_byol_cassle

The table's number is the average accuracy of linear/domain_aware;
linear/class_incremental is one probe on all domains. `config.method.base` brings its
own learning rates, decay, augmentation and lambda with it. Joint:
--config.scenario.name=joint, and then a probe for each domain by configs/transfer.py,
see docs/paper_pnr_tables.md. `configs/pnr_domainnet.py:debug` runs the same code in
seconds, on digits, whose slices stand for domains.

Fine-tuning and CaSSLe were trained in the paper at other rates than here, by CaSSLe's
scripts (docs/methods_deviations.md): they do not compare with runs of this file. Probe
rates are the scripts' and, except VICReg, Table 16's of each base; for PNR Table 16
has 3.0 with every base: --config.evaluators.linear.lr=3.0.

Departures: as configs/pnr_imagenet100.py. CaSSLe's scripts have 64 images on each of 4
GPUs, PNR's 128 on each of 2. The probes run after the last task alone and there is no
plasticity, for their cost (--config.evaluators.linear.last_only=False and
--config.plasticity=True bring them).
"""

from jaxcl.config import files, recipe, shrink

pnr = files.load_paper("pnr")

# ImageNet's, except for two lambdas
BASES = pnr.IMAGENET | {
    "vicreg": (0.4, 1e-4, 0.3, 8.0),
    "lejepa": (0.4, 1e-4, 0.3, 0.32),  # ours
}


def get_config(arg=None):
    (debug,) = recipe.parse_words(arg)
    config, _ = pnr.full_imagenet("pnr_domainnet", BASES)
    config.epochs = 200
    config.data = {
        "name": "image_lists",
        "path": "data/domainnet",
        "domains": ("real", "quickdraw", "painting", "sketch", "infograph", "clipart"),
    }
    config.scenario = {"name": "domain"}  # in the order of the domains above
    config.evaluators.linear.last_only = True
    config.plasticity = False
    return shrink.shrink(config) if debug else config
