"""The peer's augmentation: batched image operations in plain PyTorch."""

import math

import torch
from torch.nn import functional


def _uniform(low, high, shape, device):
    return low + (high - low) * torch.rand(shape, device=device)


def gray(x):
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)
    return (x * weights[:, None, None]).sum(1, keepdim=True)


def turned(x, turn):
    """The hue turned by `turn` of the circle: HSV there and back."""
    r, g, b = x.unbind(1)
    top = x.amax(1)
    chroma = top - x.amin(1)
    ramp = torch.where(top == r, g - b, torch.where(top == g, b - r, r - g))
    start = torch.where(top == r, 0.0, torch.where(top == g, 2.0, 4.0))
    hue = ramp / chroma.clamp_min(1e-12) + start + 6.0 * turn
    planes = []
    for offset in (5.0, 3.0, 1.0):
        place = (hue + offset) % 6.0
        planes.append(top - chroma * torch.minimum(place, 4.0 - place).clamp(0.0, 1.0))
    return torch.stack(planes, 1)


class Augment:
    """One view of u8[B,3,H,W] -> f32[B,3,size,size], normalised."""

    def __init__(self, section):
        self.options = dict(section)

    def __call__(self, images, view):
        o, n, device = self.options, len(images), images.device
        x = images.float() / 255.0
        if o.get("crop", True):
            x = self._crop(x)
        if any(o["jitter"]) and o["jitter_probability"]:
            x = self._jitter(x)

        def chance(p):
            return torch.rand((n, 1, 1, 1), device=device) < p

        if o["grayscale"]:
            x = torch.where(chance(o["grayscale"]), gray(x), x)
        if o["blur"][view]:
            x = torch.where(chance(o["blur"][view]), self._blur(x), x)
        if o["solarize"][view]:
            inverted = torch.where(x >= 128 / 255, 1.0 - x, x)
            x = torch.where(chance(o["solarize"][view]), inverted, x)
        if o["flip"]:
            x = torch.where(chance(o["flip"]), x.flip(-1), x)
        mean, std = (torch.tensor(o[key], device=device) for key in ("mean", "std"))
        return (x - mean[:, None, None]) / std[:, None, None]

    def _crop(self, x):
        n, _, height, width = x.shape
        area = height * width * _uniform(*self.options["scale"], (n, 10), x.device)
        aspect = _uniform(math.log(3 / 4), math.log(4 / 3), (n, 10), x.device).exp()
        w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first, whole = fits.int().argmax(1, keepdim=True), ~fits.any(1)
        w = torch.where(whole, width, w.gather(1, first)[:, 0])
        h = torch.where(whole, height, h.gather(1, first)[:, 0])
        top = (torch.rand(n, device=x.device) * (height - h + 1)).floor()
        left = (torch.rand(n, device=x.device) * (width - w + 1)).floor()
        rows, columns = self._weights(top, h, height), self._weights(left, w, width)
        return (rows @ x @ columns.mT).clamp(0.0, 1.0)

    def _weights(self, start, length, extent):
        """Antialiased bicubic resampling as matrices f32[B, 1, size, extent]."""
        size = self.options["size"]
        scale = (length / size)[:, None, None]
        begin, end = start[:, None, None], (start + length)[:, None, None]
        out = torch.arange(size, device=start.device)[:, None] + 0.5
        pixel = torch.arange(extent, device=start.device) + 0.5
        d = ((pixel - begin - out * scale) / scale.clamp_min(1.0)).abs()
        near = (1.5 * d - 2.5) * d * d + 1.0
        far = ((-0.5 * d + 2.5) * d - 4.0) * d + 2.0
        kernel = torch.where(d < 1.0, near, torch.where(d < 2.0, far, 0.0))
        kernel = kernel * ((pixel > begin) & (pixel < end))
        return (kernel / kernel.sum(-1, keepdim=True))[:, None]

    def _jitter(self, x):
        n, device = len(x), x.device
        draws = torch.rand((n, 1, 1, 1), device=device)
        applied = draws < self.options["jitter_probability"]

        def factor(strength):
            drawn = _uniform(max(0.0, 1 - strength), 1 + strength, (n, 1, 1, 1), device)
            return torch.where(applied, drawn, 1.0)

        *strengths, hue = self.options["jitter"]
        for operation in torch.randperm(4).tolist():
            if operation == 3:
                turn = _uniform(-hue, hue, (n, 1, 1), device) * applied[:, 0]
                x = turned(x, turn) if hue else x
            elif operation == 0:
                x = (factor(strengths[0]) * x).clamp(0.0, 1.0)
            else:
                level = gray(x)
                level = level.mean((1, 2, 3), keepdim=True) if operation == 1 else level
                by = factor(strengths[operation])
                x = torch.lerp(level.expand_as(x), x, by).clamp(0.0, 1.0)
        return x

    def _blur(self, x):
        """Gaussian per image, replicated edges, as two banded products."""
        low, high = self.options["sigma"]
        radius, extent = math.ceil(5.5 * high), x.shape[-1]
        sigma = _uniform(low, high, (len(x), 1, 1, 1), x.device)
        pixel = torch.arange(extent, device=x.device)[:, None]
        distance = torch.arange(-radius, extent + radius, device=x.device) - pixel
        band = torch.exp(-0.5 * (distance / sigma) ** 2) * (distance.abs() <= radius)
        band = band / band.sum(-1, keepdim=True)
        padded = functional.pad(x, (radius,) * 4, mode="replicate")
        return band @ padded @ band.mT
