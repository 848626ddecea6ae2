"""One of two processes that disagree; says for each case how the run was refused.

Words: the port of process 0, the number of this process, a folder.
"""

import contextlib
import json
import os
import pathlib
import sys
from unittest import mock

import jax
import numpy as np

from helpers import run_directories, toy
from jaxcl import sharding
from jaxcl.config import build
from jaxcl.data.stream import identity
from jaxcl.run import agreement


@contextlib.contextmanager
def flag(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    yield
    jax.config.update(name, before)


def write_set(name, rank, rows=40, moved=0):
    """Write a set of the same relative path and other rows in each process."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)
    images[7] += moved
    label = np.arange(40) % 4
    arrays = {"train_x": images[:rows], "train_y": label[:rows]}
    np.savez(name, **arrays, test_x=images[:8], test_y=label[:8])
    return {"data": {"name": "npz", "path": name}}


def main(port, rank, folder):
    sharding.initialize(f"127.0.0.1:{port}", 2, rank, timeout=60)
    here = folder / f"process{rank}"
    here.mkdir()
    os.chdir(here)

    def say(case, changes=None, context=None, workdir="run"):
        base = {"devices": 2, "scenario.num_tasks": 2, "batch_size": 4}
        config = toy.config(**base | (changes or {}))
        message = ""
        with run_directories.untraced(), context or contextlib.nullcontext():
            try:
                build.build(config, folder / workdir)
            except (ValueError, OSError) as error:
                message = str(error)
        print(json.dumps([case, message]), flush=True)

    say("lr", {"optimizer.lr": (0.1, 1e-5)[rank]})
    say("seed", {"seed": rank})
    say("in one alone", {"optimizer.momentum": 0.5} if rank else {})
    say("misspelt in one", {"method.temprature": 0.5} if rank else {})
    say("x64", context=flag("jax_enable_x64", bool(rank)))
    say("prng", context=flag("jax_default_prng_impl", ("threefry2x32", "rbg")[rank]))
    precision = flag("jax_default_matmul_precision", (None, "bfloat16")[rank])
    say("precision", context=precision)
    say("workdir", workdir=f"run{rank}")
    code = mock.patch.object(agreement, "_digest_code", lambda: f"sha256 {rank}")
    say("code", context=code)
    say("one device", {"devices": 1})
    lost = mock.patch.object(identity, "identify", side_effect=OSError("a lost disk"))
    say("one fails", context=lost if rank else None)
    say("pixels", write_set("a.npz", rank, moved=rank))
    say("rows", write_set("b.npz", rank, rows=40 - 4 * rank))
    say("may differ", {"workers": rank, "progress": bool(rank)})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
