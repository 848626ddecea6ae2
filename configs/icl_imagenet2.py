"""ICL on two classes of ImageNet: an image encoder meets new images of both.

Ji et al., WSDM 2023, Table 3: the first 1 - growth of the images, shuffled by the seed,
then the others; a ResNet-18 with its Linear of 1000, batches of 32, until the mean loss
of an epoch has not come lower for 50 epochs. The paper names neither the classes nor
the learning rate, which it searches among 1e-3, 1e-4 and 1e-5.
Paper, Table 3, times sooner than retraining in seconds / epochs at growth 0.3, 0.5,
0.7: finetune 10.7 / 3.2, 3.9 / 2.0, 2.2 / 1.6; replay 3.4 / 2.0, 2.0 / 1.6, 3.4 / 2.7;
distill 6.9 / 2.9, 2.1 / 1.4, 2.2 / 1.5; icl 11.2 / 16.8, 6.2 / 13.2, 5.9 / 12.7; no_lrl
9.6 / 14.7, 3.4 / 5.3, 1.1 / 2.2; no_meta 9.2 / 15.7, 4.8 / 8.1, 1.7 / 3.8; no_both 9.8
/ 16.4, 1.6 / 2.7, 1.0 / 1.3.

  python -m jaxcl.main --config=configs/icl_imagenet2.py
  python -m jaxcl.main --config=configs/icl_imagenet2.py:retrain \
      --config.scenario.growth=0.3 --config.seeds=5

Rows: icl (the default), no_lrl, no_lrl_sgd, no_meta, no_both;
retrain, continue, finetune, replay, distill; retrain_sgd and continue_sgd, by plain SGD
at 0.03; the controls frozen and random, which learn nothing of what is new. With `:old`
the first task alone is trained, from which each row can go on:
`--config.start=runs/icl_imagenet2_old`.
`configs/icl_imagenet2.py:debug` and, say, `configs/icl_imagenet2.py:finetune,debug` run
in seconds, on digits.
"""

import pathlib

from jaxcl.config import files, recipe, shrink

icl = files.load_paper("icl")


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, icl.ROWS)
    config = icl.images("imagenet2", row, 224)
    config.data = {
        "name": "image_folder",
        "path": "data/imagenet",  # holds train/CLASS/IMAGE and val/CLASS/IMAGE
        # Chihuahua, tabby
        "classes": str(pathlib.Path(__file__).parent / "imagenet2.txt"),
        "size": 224,  # all images are in memory, which the fixed loss needs
        "resident": True,
    }
    config.augment.update(
        blur=0.5, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    config.method.output_dim = 1000
    return shrink.shrink(config) if debug else config
