"""What a picture shows, and what is written on the axes of a figure."""

import numpy as np
from PIL import Image


def check_whole(path):
    """Something is drawn, and nothing is cut off at the edge."""
    with Image.open(path) as picture:
        ink = (np.asarray(picture.convert("RGB")) < 250).any(-1)
    assert ink.any()
    assert not any((ink[0].any(), ink[-1].any(), ink[:, 0].any(), ink[:, -1].any()))


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]
