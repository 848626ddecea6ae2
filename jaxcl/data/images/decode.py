"""Decode images, by OpenCV or by Pillow."""

import importlib.util
import io
from typing import Literal, NamedTuple, get_args

import numpy as np
from PIL import Image, UnidentifiedImageError

from jaxcl.errors import Refused


class Unreadable(Refused):
    """An image that cannot be read or decoded; the message names it."""


Channels = Literal[1, 3]  # grey, or RGB
PIXELS = 89_478_485  # Pillow's own limit: 256 MiB of RGB
JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"


def lift_pillow_limit() -> None:
    """Lift Pillow's limit of pixels, since config.data.max_pixels has one.

    For commands alone: Pillow's limit holds for the whole process.
    """
    Image.MAX_IMAGE_PIXELS = None


class Decoding(NamedTuple):
    """Settings for decoding images; a call decodes one."""

    decoder: str  # "cv2" or "pillow"
    channels: int = 3  # 3 is RGB, 1 is grey
    max_pixels: int = PIXELS
    background: int = 255  # level behind transparent pixels
    bits: int | None = None  # bits that 16-bit greys use; None: as an image shows
    jpeg_side: int | None = None  # see `shrinkage`; None: JPEGs are decoded whole

    def __call__(self, data: bytes, name: str) -> np.ndarray:
        """Decode an image to u8[h,w,C], see `convert`.

        The orientation in EXIF is NOT applied, as in torchvision's loader and TFDS.

        Raises:
          Unreadable: the bytes are no image, are truncated, or say that they are an
            image of more than `max_pixels`; the message has `name`.
        """
        try:
            with Image.open(io.BytesIO(data)) as opened:  # reads the header alone
                self.check_size(name, *opened.size[::-1])
                factor = self.shrinkage(opened)
                if self.decoder == "cv2" and _is_plain(data, opened):
                    image = _by_cv2(data, self.channels, factor)
                    if image is not None:
                        return image.reshape(*image.shape[:2], self.channels)
                if factor > 1:
                    width, height = opened.size
                    opened.draft(None, (width // factor, height // factor))
                return self.convert(opened, name)
        except Unreadable:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise Unreadable(
                f"{name}: {error}; allowed are config.data.max_pixels={self.max_pixels}"
                f" and PIL.Image.MAX_IMAGE_PIXELS={Image.MAX_IMAGE_PIXELS}"
            ) from error
        except Exception as error:  # of damaged bytes Pillow's plugins raise anything
            unknown = isinstance(error, UnidentifiedImageError)
            raise Unreadable(
                f"{name} cannot be decoded: "
                f"{'not a known format' if unknown else repr(error)}; "
                'config.data.on_corrupt="skip" takes another image in its place'
            ) from error

    def convert(self, image: Image.Image, name: str) -> np.ndarray:
        """Return the pixels of a PIL image, u8[h,w,C].

        Grey, palette and CMYK images become RGB, or grey where `channels` is 1.
        Transparent pixels are composed on the grey level `background`. 16-bit greys
        keep the upper eight of `bits` bits; None: of as many as the image uses.

        Raises:
          Unreadable: floating pixels, whose range is not known; 16-bit ones that use
            more than `bits`.
        """
        if image.mode == "I" or image.mode.startswith("I;16"):
            pixels = _eight_bits(np.asarray(image), name, self.bits)
            image = Image.fromarray(pixels)
        elif image.mode == "F":
            low, high = image.getextrema()
            raise Unreadable(
                f"{name}: has floating pixels from {low} to {high}; must be of 8 or 16 "
                "bits"
            )
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            ground = (self.background,) * 3 + (255,)
            ground = Image.new("RGBA", image.size, ground)
            image = Image.alpha_composite(ground, image)
        pixels = np.asarray(image.convert("RGB" if self.channels == 3 else "L"))
        return pixels.reshape(*pixels.shape[:2], self.channels)

    def shrinkage(self, opened: Image.Image) -> int:
        """Return 8, 4, 2 or 1: a JPEG is decoded to this part of its height and width.

        It is the largest with which the shorter side keeps `jpeg_side` pixels. A JPEG
        is stored by frequency, so that fewer of its coefficients are decoded.
        """
        if self.jpeg_side is None or opened.format != "JPEG":
            return 1
        shorter = min(opened.size)
        return next((n for n in (8, 4, 2) if shorter // n >= self.jpeg_side), 1)

    def check_size(self, name: str, height: int, width: int) -> None:
        """Refuse an image that its header shows to be too large."""
        if not 0 < height * width <= self.max_pixels:
            raise Unreadable(
                f"{name} is {height} x {width} pixels: must be at least 1, and at most "
                f"config.data.max_pixels={self.max_pixels} in all"
            )


def _eight_bits(pixels, name, bits) -> np.ndarray:
    """Return the upper eight bits of greys of `bits` bits."""
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0 or high > 65535:
        raise Unreadable(
            f"{name}: has pixels from {low} to {high}; must be of 8 or 16 bits"
        )
    if bits is None:  # what one image alone can tell
        bits = 8 if high < 256 else 16 if high >> 15 else None
    if bits is None or high >> bits:
        raise Unreadable(
            f"{name}: has 16-bit pixels up to {high}; config.data.bits, from 8 to 16, "
            "says how many bits all images of a set use"
        )
    return (pixels >> (bits - 8)).astype(np.uint8)


def _by_cv2(data, channels, factor) -> np.ndarray | None:
    """Return the image, None where OpenCV cannot decode it."""
    import cv2  # an extra; without it Pillow decodes

    if factor > 1:
        kind = "COLOR" if channels == 3 else "GRAYSCALE"
        mode = getattr(cv2, f"IMREAD_REDUCED_{kind}_{factor}")
    else:
        mode = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    buffer = np.frombuffer(data, np.uint8)
    try:
        image = cv2.imdecode(buffer, mode | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None
    # It has no name for a smaller RGB image.
    is_bgr = factor > 1 and channels == 3
    return np.ascontiguousarray(image[..., ::-1]) if is_bgr else image


def _is_plain(data: bytes, opened: Image.Image) -> bool:
    """Tell whether OpenCV decodes an image as Pillow does.

    That holds for a JPEG, or a PNG of 8 bits without transparency. The image must end
    in its end marker: OpenCV fills the missing part of a truncated image with grey,
    silently.
    """
    if data[:2] == JPEG:
        return b"\xff\xd9" in data[-64:]
    opaque = not opened.has_transparency_data
    plain = data[:8] == _PNG and data[24] <= 8 and opaque
    return plain and opened.mode != "LA" and b"IEND" in data[-64:]


Decoder = Literal["auto", "cv2", "pillow"]


def choose_decoder(decoder: Decoder = "auto") -> str:
    """Choose the image library of a run; "auto" prefers cv2.

    The two differ by a level or two in JPEG pixels and more in resizing, so a run
    chooses one, once, and records it (`Dataset.decoder`).
    """
    if decoder not in get_args(Decoder):
        raise Refused("decoder", decoder, f"must be one of {get_args(Decoder)}")
    installed = importlib.util.find_spec("cv2") is not None
    if decoder == "cv2" and not installed:
        advice = "pip install 'jaxcl[fast]'"
        raise Refused("decoder", decoder, "OpenCV is not installed", advice)
    return "pillow" if decoder == "pillow" or not installed else "cv2"
