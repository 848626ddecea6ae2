"""Boxes of random crops against those that torchvision draws."""

import math

import numpy as np
from scipy import stats


def torchvision_box(rng, height, width, scale, ratio):
    """RandomResizedCrop.get_params: (top, left, h, w)."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = rng.integers(0, height - h + 1)
            return top, rng.integers(0, width - w + 1), h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def check_boxes(boxes, height, width, scale, ratio):
    """Boxes i[N, 4] lie in the image and are distributed as torchvision's."""
    top, left, h, w = boxes.T
    assert np.all((top >= 0) & (left >= 0) & (top + h <= height) & (left + w <= width))
    rng = np.random.default_rng(0)
    expected = [torchvision_box(rng, height, width, scale, ratio) for _ in boxes]

    def measures(boxes):
        top, left, h, w = np.asarray(boxes).T
        return h * w, w / h, top, left, top / (height - h + 1), left / (width - w + 1)

    bound = 1.95 * math.sqrt(2 / len(boxes))  # Kolmogorov-Smirnov, p = 0.001
    for a, b in zip(measures(boxes), measures(expected), strict=True):
        assert stats.ks_2samp(a, b).statistic < bound
    if np.ptp(top) and np.ptp(left):  # neither says where the other is
        room = (height > h) & (width > w)
        places = top[room] / (height - h)[room], left[room] / (width - w)[room]
        assert abs(stats.spearmanr(*places).statistic) < 4 / math.sqrt(room.sum())
