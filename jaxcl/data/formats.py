"""Measure how many bits the 16-bit greys of a set use: one scale for all its images."""

import concurrent.futures
import io
import warnings

import numpy as np
from PIL import Image

from jaxcl.data import files as files_lib
from jaxcl.data import stream

_SAMPLED = 512  # images of each split, evenly spaced


def find_bits(dataset: stream.Dataset, decoding: files_lib.Decoding) -> stream.Dataset:
    """Tell the readers of a set how many bits its 16-bit greys use.

    That is config.data.bits, or as many as the largest value of some hundred images
    has.
    """
    bits = decoding.bits
    if bits is None:
        loads = [x.load for x in stream.splits_of(dataset).values() if x.load]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            most = [x for load in loads for x in pool.map(*_sampled(load))]
        if not any(most):
            return dataset
        bits = max(max(most).bit_length(), 8)
        text = (
            f"{dataset.name}: 16-bit greys up to {max(most):,} are read as of {bits} "
            "bits, of which the upper eight are kept; config.data.bits sets a number"
        )
        warnings.warn(text, stacklevel=2)

    def with_bits(examples):
        read = examples.load.read
        read = read._replace(decoding=read.decoding._replace(bits=bits))
        return examples._replace(load=examples.load._replace(read=read))

    return stream.map_splits(dataset._replace(bits=bits), with_bits)


def _sampled(load) -> tuple:
    """Return a function and the rows to call it with."""
    count = len(load.rows)
    rows = np.unique(np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int))

    def most(row) -> int:
        """Return the largest value of a 16-bit grey, 0 of any other image."""
        try:
            with Image.open(io.BytesIO(load.raw(row))) as image:
                if image.mode == "I" or image.mode.startswith("I;16"):
                    return int(np.asarray(image).max())
        except Exception:  # of damaged bytes Pillow's plugins raise anything
            pass
        return 0

    return most, rows
