"""Online class-incremental learning on Split MiniImageNet: ER-ACE and all baselines.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021,
Fig. 5 (right): 20 tasks x 5 classes, 84 pixels, one pass, batches of 10 with 10
replayed, 100 images per class in memory, reduced ResNet-18 (640 features), no
augmentation. The paper gives no numbers except for iid, 17: ER-ACE beats it and comes
close to iid++. The later state of its code has, on validation data, ER-ACE 22.4, ER
18.3, MIR 15.0, iid 20.5, iid++ 28.4. Ours: not run; the images were not available.

PATH holds one folder of images per class, the order of their names being the order of
the stream: in the released code the 64 meta-train classes, then the 16 of
meta-validation, then the 20 of meta-test. A fifth of each class is the test split.

  python -m jaxcl.main --config=configs/er_ace_miniimagenet.py --config.data.path=PATH
  python -m jaxcl.main --config=configs/er_ace_miniimagenet.py:er \
      --config.data.path=PATH --config.seeds=3

Rows of the table: er_ace (the default) and the other keys of
METHODS below. `configs/er_ace_miniimagenet.py:debug` and, say,
`configs/er_ace_miniimagenet.py:mir,debug` run in seconds, on digits.
"""

from jaxcl.config import files, recipe, shrink

online = files.load_paper("online")
METHODS = online.ER_ACE | {
    "er_aml": ({"name": "er_aml", "temperature": 0.1}, 0.1, {}),
    "er": ({"name": "er"}, 0.05, {}),
    "er_task_free": ({"name": "er", "replay_from": "all"}, 0.05, {}),
    "mir": ({"name": "mir", "candidates": 25}, 0.1, {}),
    "aser": ({"name": "aser", "per_class": 3}, 0.1, {}),
}


def get_config(arg=None):
    row, debug = recipe.parse_words(arg, METHODS)
    config = online.er_ace(
        "miniimagenet", METHODS, row, size=84, num_tasks=20, per_class=100
    )
    config.data = {
        "name": "image_folder",
        "path": "data/miniimagenet",
        "size": 84,
        "resident": True,
        "validation": 0.05,
    }
    return shrink.shrink(config) if debug else config
