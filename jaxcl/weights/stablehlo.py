"""Write an encoder as one program for other systems: `jaxcl export --stablehlo`.

The file holds network and weights as StableHLO for CPUs, NVIDIA's GPUs and TPUs, and
takes batches of any size. `jax.export.deserialize` reads it without this library.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import export

from jaxcl import numerics, sharding
from jaxcl.data.augment import images as augment_images
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.weights import encoder

FILE = "encoder.stablehlo"
PLATFORMS = ("cpu", "cuda", "tpu")
# Inputs of a program: pixels from 0 to 255, or images normalised as the card says.
Pixels = Literal["uint8", "float32"]


def make_program(network: encoder.Encoder, pixels: Pixels) -> tuple[Callable, tuple]:
    """Make a function from images to features that contains the weights.

    Args:
      network: an encoder of images; the program contains its adapter, if any, too.
      pixels: type of the images; the function normalises images of "uint8".

    Returns:
      The function, [B, S, S, C] -> f32[B, D], and (S, S, C).

    Raises:
      Refused: the network is an encoder of graphs.
    """
    inputs = network.card["input"]
    if inputs["kind"] != "images":
        raise Refused(
            f"an encoder of {inputs['kind']} cannot be written as a program; must be "
            "of images"
        )
    prepare = augment_images.make_eval(
        size=inputs["size"], mean=tuple(inputs["mean"]), std=tuple(inputs["std"])
    )

    def embed_images(images):
        images = prepare(images) if pixels == "uint8" else images
        rows, _ = network.apply(network.params, network.stats, images)
        adapter = network.adapter
        return rows if adapter is None else maps.map_features(adapter, rows)

    return embed_images, (inputs["size"], inputs["size"], inputs["channels"])


@numerics.pinned()
def pack_program(network: encoder.Encoder, pixels: Pixels) -> bytes:
    """Serialise the program of an encoder as bytes, see `make_program`."""
    embed, shape = make_program(network, pixels)
    (batch,) = export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *shape), jnp.dtype(pixels))
    # Leave out the forms of layers that suit only a CPU.
    with sharding.compile_target():
        exported = export.export(jax.jit(embed), platforms=PLATFORMS)(images)
    return bytes(exported.serialize())


@numerics.pinned()
def describe(network: encoder.Encoder, pixels: Pixels) -> dict:
    """Describe the program for the card."""
    shape = make_program(network, pixels)[1]
    return {
        "input": {"dtype": pixels, "shape": ["batch", *shape]},
        "output": {"dtype": "float32", "shape": ["batch", network.num_features]},
        "platforms": list(PLATFORMS),
        "jax": jax.__version__,
        "readable": "by versions of JAX released up to six months after this one",
    }
