"""CPU time of the convolutions of a ResNet-18 at 32 pixels, in several forms.

  taskset -c 0 python benchmarks/convolutions.py --peer

Each form is compiled alone, in float32. "plain" is XLA's convolution, "pieces" that of
jaxcl/nets/cpu.py, "patches" one matrix product with the patches of some images, of
eight at a time. `--peer` needs PyTorch.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcl.nets import cpu

# Rows, side of the map, channels, filters, side of the kernel, stride.
CASES = (
    (128, 32, 4, 64, 3, 1),
    (128, 32, 64, 64, 3, 1),
    (128, 32, 64, 128, 3, 2),
    (128, 16, 128, 128, 3, 1),
    (128, 16, 128, 256, 3, 2),
    (128, 8, 256, 256, 3, 1),
    (128, 8, 256, 512, 3, 2),
    (128, 4, 512, 512, 3, 1),
    (128, 32, 64, 128, 1, 2),
    (128, 16, 128, 256, 1, 2),
    (128, 8, 256, 512, 1, 2),
    (20, 32, 20, 20, 3, 1),
)
FORMS = ("plain", "pieces", "patches")
WHAT = ("forward", "for the kernel", "for the images")
THEIRS = ("PyTorch: forward", "both gradients")
LAYOUT = ("NHWC", "HWIO", "NHWC")
ROWS = 8  # of a piece of patches


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--cases", type=int, nargs="*", help="numbers in `CASES`, from 0")
    made.add_argument("--repeats", type=int, default=8)
    made.add_argument("--peer", action="store_true", help="also time PyTorch")
    return made


def least(function, *arguments, repeats: int) -> float:
    """CPU milliseconds of a call, the least of some."""
    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(function(*arguments))
        found.append(1e3 * (time.process_time() - start))
    return min(found)


def by_patches(x, kernel, stride: int):
    """The convolution as matrix products: patches of some images times the kernel."""
    side, _, channels, filters = kernel.shape
    x = jnp.pad(x, ((0, 0), (side // 2,) * 2, (side // 2,) * 2, (0, 0)))
    places = (x.shape[1] - side) // stride + 1
    reach = stride * (places - 1) + 1

    def of_rows(x):
        cut = [
            x[:, i : i + reach : stride, j : j + reach : stride]
            for i in range(side)
            for j in range(side)
        ]
        return jnp.concatenate(cut, axis=-1).reshape(-1, side * side * channels)

    matrix = kernel.reshape(-1, filters)
    parts = [of_rows(x[i : i + ROWS]) @ matrix for i in range(0, len(x), ROWS)]
    return jnp.concatenate(parts).reshape(len(x), places, places, filters)


def forms(side: int, stride: int) -> dict:
    """Name of a form -> (images, kernel) -> maps."""
    options = {"padding": [(side // 2,) * 2] * 2, "dimension_numbers": LAYOUT}
    plain = functools.partial(
        lax.conv_general_dilated, window_strides=(stride,) * 2, **options
    )
    pieces = functools.partial(cpu.conv, strides=(stride,) * 2, **options)
    patches = functools.partial(by_patches, stride=stride)
    return dict(zip(FORMS, (plain, pieces, patches), strict=True))


def parts_of(convolve) -> dict:
    """Name in `WHAT` -> function of (images, kernel, gradient of the maps)."""
    return {
        "forward": lambda x, kernel, given: convolve(x, kernel),
        "for the kernel": lambda x, kernel, given: jax.vjp(
            lambda k: convolve(x, k), kernel
        )[1](given)[0],
        "for the images": lambda x, kernel, given: jax.vjp(
            lambda x: convolve(x, kernel), x
        )[1](given)[0],
    }


def peer(x, kernel, given, stride: int, repeats: int) -> tuple[float, float]:
    """CPU milliseconds of PyTorch, channels last: forward, and both gradients."""
    import torch  # with --peer alone

    torch.set_num_threads(1)

    def last(array, axes):
        made = torch.tensor(np.asarray(array)).permute(*axes)
        return made.contiguous(memory_format=torch.channels_last)

    x, given = (last(array, (0, 3, 1, 2)) for array in (x, given))
    kernel, padding = last(kernel, (3, 2, 0, 1)), len(kernel) // 2
    for array in (x, kernel):
        array.requires_grad_()

    def forward():
        return torch.nn.functional.conv2d(x, kernel, padding=padding, stride=stride)

    outputs = forward()

    def backward():
        return torch.autograd.grad(outputs, (x, kernel), given, retain_graph=True)

    return least(forward, repeats=repeats), least(backward, repeats=repeats)


def measure(case, *, repeats: int, peer_too: bool) -> dict:
    """Name of a column -> CPU milliseconds, of a row of `CASES`."""
    rows, map_side, channels, filters, side, stride = case
    keys = jax.random.split(jax.random.key(0), 3)
    places = -(-map_side // stride)
    shapes = (
        (rows, map_side, map_side, channels),
        (side, side, channels, filters),
        (rows, places, places, filters),
    )
    arrays = [
        jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)
    ]
    found = {
        f"{name}: {what}": least(jax.jit(function), *arrays, repeats=repeats)
        for name, convolve in forms(side, stride).items()
        for what, function in parts_of(convolve).items()
    }
    if peer_too:
        times = peer(*arrays, stride, repeats)
        found |= dict(zip(THEIRS, times, strict=True))
    return found


def main(argv=None) -> list[dict]:
    """The command; prints a line for each case, and returns what it printed."""
    args = parser().parse_args(argv)
    chosen = CASES if args.cases is None else [CASES[i] for i in args.cases]
    lines = []
    for case in chosen:
        rows, map_side, channels, filters, side, stride = case
        found = measure(case, repeats=args.repeats, peer_too=args.peer)
        if not lines:
            print("| rows, map, channels, kernel | " + " | ".join(found) + " |")
            print("|---" * (len(found) + 1) + "|")
        strided = f", stride {stride}" if stride > 1 else ""
        name = f"{rows}, {map_side}, {channels} to {filters}, {side}x{side}{strided}"
        cells = [f"{value:.3g}" for value in found.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        lines.append({"case": case, **found})
    return lines


if __name__ == "__main__":
    main()
