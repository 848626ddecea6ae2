"""Write an exported encoder as ONNX and compare: python launch/to_onnx.py FOLDER.

FOLDER is what `jaxcl export` or `jaxcl import` wrote; encoder.onnx comes into it.
jax2onnx wants an older orbax than jaxcl, so this runs in an environment of its own:

  python -m venv onnx
  onnx/bin/pip install jax2onnx "etils[epath]" safetensors array-record \
      ml-collections absl-py pillow
  onnx/bin/pip install --no-deps .
  onnx/bin/python launch/to_onnx.py exports/mine

ONNX Runtime then computes the features of random images, of one and of five. The exit
code is 1 if they differ from JAX's by more than --tolerance of their length.
"""

import argparse
import pathlib
import sys
import typing

import jax
import numpy as np
from jax import export

import jaxcl
from jaxcl import sharding
from jaxcl.weights import stablehlo

FILE = "encoder.onnx"


def convert(network, path, pixels) -> None:
    """Write the program of an encoder, for a batch of any size, as an ONNX file."""
    import jax2onnx

    embed, shape = stablehlo.make_program(network, pixels)
    (batch,) = export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *shape), np.dtype(pixels))
    with sharding.compile_target():  # convolutions as they are written
        jax2onnx.to_onnx(
            embed,
            [images],
            model_name="encoder",
            return_mode="file",
            output_path=path,
            input_names=["images"],
            output_names=["features"],
        )


def compare(network, path, pixels, count) -> float:
    """Compute how far features of random images differ, as a share of their length."""
    import onnxruntime

    embed, shape = stablehlo.make_program(network, pixels)
    images = np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)
    images = images if pixels == "uint8" else np.asarray(network.prepare(images))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (have,) = session.run(None, {"images": images})
    want = np.asarray(jax.jit(embed)(images))
    return float(np.linalg.norm(have - want) / np.linalg.norm(want))


def main(argv=None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=pathlib.Path, help="of an exported encoder")
    options.add_argument(
        "--pixels",
        choices=typing.get_args(stablehlo.Pixels),
        default="uint8",
        help="pixels, normalised by the program (uint8), or normalised images",
    )
    options.add_argument("--tolerance", type=float, default=1e-4)
    given = options.parse_args(argv)
    network, path = jaxcl.load_encoder(given.folder), str(given.folder / FILE)
    convert(network, path, given.pixels)
    gaps = {n: compare(network, path, given.pixels, n) for n in (1, 5)}
    for count, gap in gaps.items():
        print(f"{path}: {count} image(s), relative difference {gap:.1e}")
    return int(not max(gaps.values()) <= given.tolerance)


if __name__ == "__main__":
    sys.exit(main())
