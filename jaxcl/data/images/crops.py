"""Crop and resize images on the host."""

import math
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxcl.errors import Refused

_RESIZED = 2**28  # pixels; a line of one pixel by millions grows by the square


def resize(
    image: np.ndarray, height: int, width: int, interpolation: str, decoder: str
) -> np.ndarray:
    """Resize u8[h,w,C] to u8[height,width,C], antialiased.

    Pillow widens its filter when shrinking; cv2 shrinks by area averaging and
    enlarges by `interpolation`.
    """
    sides = image.shape[:2]
    if sides == (height, width):
        return image
    if decoder == "pillow":
        flat = image[..., 0] if image.shape[2] == 1 else image
        picture = Image.fromarray(np.ascontiguousarray(flat))
        method = Image.Resampling[interpolation.upper()]
        resized = picture.resize((width, height), method)
        return np.asarray(resized).reshape(height, width, -1)
    import cv2

    small = min(height, sides[0]), min(width, sides[1])
    if small != sides:
        image = cv2.resize(image, small[::-1], interpolation=cv2.INTER_AREA)
    if small != (height, width):
        filters = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
        image = cv2.resize(image, (width, height), interpolation=filters[interpolation])
    return image.reshape(height, width, -1)


class CenterCrop(NamedTuple):
    """Resizes the shorter side to `resize`, then cuts the middle `size` x `size`."""

    size: int
    resize: int
    interpolation: str = "bicubic"
    decoder: str = "auto"

    def __call__(self, image: np.ndarray, rng: Any = None) -> np.ndarray:
        """Crop u8[h,w,C] to u8[size,size,C]; nothing is drawn."""
        h, w = image.shape[:2]
        short = min(h, w)
        # int() as in torchvision's Resize: the longer side is rounded down.
        h, w = int(self.resize * h / short), int(self.resize * w / short)
        if h * w > _RESIZED:
            raise Refused(
                f"an image of {image.shape[0]} x {image.shape[1]} pixels would be "
                f"resized to {h} x {w}: too long for its shorter side"
            )
        image = resize(image, h, w, self.interpolation, self.decoder)
        top, left = round((h - self.size) / 2), round((w - self.size) / 2)
        return image[top : top + self.size, left : left + self.size]


class RandomCrop(NamedTuple):
    """Random resized crop, with torchvision's distribution of boxes."""

    size: int
    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height, drawn on a log scale
    interpolation: str = "bicubic"
    decoder: str = "auto"

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Crop u8[h,w,C] to u8[size,size,C]."""
        top, left, h, w = self.box(image.shape[0], image.shape[1], rng)
        cut = image[top : top + h, left : left + w]
        return resize(cut, self.size, self.size, self.interpolation, self.decoder)

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        """Draw a box: its top, left, height and width."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = rng.integers(0, height - h, endpoint=True)
                left = rng.integers(0, width - w, endpoint=True)
                return int(top), int(left), h, w
        # No draw fitted; take the largest middle box whose ratio is allowed.
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        return (height - h) // 2, (width - w) // 2, h, w
