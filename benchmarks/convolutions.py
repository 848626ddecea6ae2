"""CPU time of convolutions of 3 x 3 and their gradients, whole and in pieces.

  taskset -c 0 python benchmarks/convolutions.py --peer

times the forms of jaxcl/nets/layers.py by themselves, each compiled alone, in float32.
The gradient for the kernel is taken whole, in pieces of eight rows, and in those that
`conv` takes. `--peer` needs PyTorch.
"""

import argparse
import functools
import time

import jax
import numpy as np
from jax import lax

from jaxcl.nets import layers

# Rows, side of the map, channels, filters, stride.
CASES = (
    (64, 32, 64, 64, 1),
    (64, 16, 128, 128, 1),
    (64, 8, 256, 256, 1),
    (64, 4, 512, 512, 1),
    (64, 56, 64, 64, 1),
    (128, 9, 256, 256, 1),
    (128, 17, 128, 256, 2),
    (128, 8, 128, 128, 1),
    (64, 32, 20, 20, 1),
    (20, 32, 20, 20, 1),
)
COLUMNS = ("whole", "pieces of 8", "pieces", "forward", "for the images")
THEIRS = ("PyTorch: forward", "both gradients")
LAYOUT = ("NHWC", "HWIO", "NHWC")


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


def forms(stride: int, rows: int) -> dict:
    """Name -> function of (images, kernel, gradient of the outputs)."""
    options = {"padding": [(1, 1)] * 2, "dimension_numbers": LAYOUT}
    plain = functools.partial(
        lax.conv_general_dilated, window_strides=(stride,) * 2, **options
    )
    ours = functools.partial(layers.conv, strides=(stride,) * 2, **options)

    def for_kernel(apply):
        def slope(x, kernel, given):
            return jax.vjp(lambda k: apply(x, k), kernel)[1](given)[0]

        return slope

    in_eights = layers._in_pieces(plain, layers.pieces(rows, 8))

    return {
        "whole": for_kernel(plain),
        "pieces of 8": for_kernel(in_eights),
        "pieces": for_kernel(ours),
        "forward": lambda x, kernel, given: ours(x, kernel),
        "for the images": lambda x, kernel, given: jax.vjp(
            lambda x: plain(x, kernel), x
        )[1](given)[0],
    }


def peer(x, kernel, given, stride: int, repeats: int) -> tuple[float, float]:
    """CPU milliseconds of PyTorch, channels last: forward, and both gradients."""
    import torch  # with --peer alone

    def last(array, axes):
        made = torch.tensor(np.asarray(array)).permute(*axes)
        return made.contiguous(memory_format=torch.channels_last)

    x, given = (last(array, (0, 3, 1, 2)) for array in (x, given))
    kernel = last(kernel, (3, 2, 0, 1))
    for array in (x, kernel):
        array.requires_grad_()

    def forward():
        return torch.nn.functional.conv2d(x, kernel, padding=1, stride=stride)

    outputs = forward()

    def backward():
        return torch.autograd.grad(outputs, (x, kernel), given, retain_graph=True)

    return least(forward, repeats=repeats), least(backward, repeats=repeats)


def measure(case, *, repeats: int, peer_too: bool) -> dict:
    """Name of a column -> CPU milliseconds, of a row of `CASES`."""
    rows, side, channels, filters, stride = case
    keys = jax.random.split(jax.random.key(0), 3)
    places = -(-side // stride)
    shapes = (
        (rows, side, side, channels),
        (3, 3, channels, filters),
        (rows, places, places, filters),
    )
    arrays = [
        jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)
    ]
    found = {
        name: least(jax.jit(function), *arrays, repeats=repeats)
        for name, function in forms(stride, rows).items()
    }
    if peer_too:
        times = peer(*arrays, stride, repeats)
        found |= dict(zip(THEIRS, times, strict=True))
    return found


def main(argv=None) -> list[dict]:
    """The command; prints a line for each case, and returns what it printed."""
    args = parser().parse_args(argv)
    chosen = CASES if args.cases is None else [CASES[i] for i in args.cases]
    columns = COLUMNS + (THEIRS if args.peer else ())
    print("| rows, map, channels | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    lines = []
    for case in chosen:
        rows, side, channels, filters, stride = case
        strided = f", stride {stride}" if stride > 1 else ""
        found = measure(case, repeats=args.repeats, peer_too=args.peer)
        name = f"{rows}, {side}x{side}, {channels} to {filters}{strided}"
        cells = [f"{found[column]:.3g}" for column in columns]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        lines.append({"case": case, **found})
    return lines


if __name__ == "__main__":
    main()
