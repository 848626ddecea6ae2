"""Your own images: joint or continual, labelled or not, at their own size.

The word behind the colon is a folder of images, or another path that
`jaxcl.config.own_images` finds a source for: an .npz file, a directory that
`jaxcl convert`, TFDS or Hugging Face's `datasets` wrote. `encoder=` may follow after a
comma: a name from `jaxcl list encoders`, or the folder of an encoder with which
training begins; `teacher=`: the folder of an encoder to learn from, by strategy
"distil"; and `size=`: pixels of a side.

  python -m jaxcl.main --config=configs/own_images.py:my_images --workdir=runs/mine
  python -m jaxcl.main --config=configs/own_images.py:my_images --workdir=runs/pnr \
      --config.method.strategy=pnr --config.scenario.num_tasks=3
  python -m jaxcl.main --config=configs/own_images.py:my_images,encoder=conv_net,size=32

Everything follows the images and can be overridden: size, mean and deviation, batch,
epochs (5 million images seen, but 50 to 400 epochs), photo augmentation, the stem or
patch of the encoder (ResNet-18 unless another is named) and its optimizer. Labels are
not needed. With a folder per class nearest neighbours evaluate the encoder on a fifth
that is held out; without, RankMe, alignment and uniformity show a collapse.
`config.method.strategy` makes the run continual: classes one after another if every
image has a label, else random slices, unless `config.scenario.name` is set.
`configs/own_images.py:debug` runs the same code in seconds, on digits.

No paper has a score for it, and none of its values was tuned. docs/own_images.md says
how each is chosen.
"""

from jaxcl.config import own_images, recipe, shrink
from jaxcl.errors import Refused


def get_config(arg=None):
    images, words = recipe.split_words(arg or "", ("encoder", "size", "teacher"))
    size = words.get("size")
    options = {
        "encoder": words.get("encoder", "resnet18"),
        "size": int(size) if size and size.isdecimal() else size,
        "teacher": words.get("teacher"),
    }
    if not images:
        raise Refused("config own_images needs a folder: jaxcl train own_images:FOLDER")
    if images != "debug":
        return own_images.config(own_images.make_section(images), **options)
    config = own_images.config({"name": "digits"}, **options)
    config.method.strategy = "pnr"  # so that there is a second task
    shrink.shrink(config)
    return config
