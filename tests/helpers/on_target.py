"""The toy's step, compiled by the compiler of a chip: `measured`.

It runs in a process of its own, `python -m helpers.on_target`: the compilers want to be
loaded before JAX has other devices, and their flags are not those of the tests.
"""

import functools
import gzip
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def _measured(target, asked):
    from jaxcl.scaling import targets

    # Programs are kept beside those that the other tests compile.
    kept = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "targets"
    # Kinds and numbers of operations are those of the full level, which takes ten times
    # as long on a TPU's compiler.
    environment = os.environ | targets.ENVIRONMENT | {"JAX_OPTIMIZATION_LEVEL": "O1"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"):
        environment.pop(name, None)
    ran = subprocess.run(
        [sys.executable, "-m", "helpers.on_target", target, asked, str(kept)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    packed = (kept / f"{found['program']}.json.gz").read_bytes()
    return found | {"text": json.loads(gzip.decompress(packed))["text"]}


def measured(target: str, changes: dict) -> dict:
    """`targets.measure` of the toy's step, and what is named below.

    Args:
      target: as `--target` has it; the toy runs on all of its devices.
      changes: to the toy's config.

    Returns:
      The dict of `targets.measure`, the program's "text", the number of "metrics" that
      a step returns, and "held", the shapes of the method's queues and memories.
    """
    return _measured(target, json.dumps(changes, sort_keys=True))


def _child(target, asked, kept):
    import jax

    from helpers import toy
    from jaxcl import sharding
    from jaxcl.config import build
    from jaxcl.run import job
    from jaxcl.scaling import hardware, targets

    chips = targets.parse(target)
    there = targets.devices(chips)
    with sharding.for_elsewhere(there):
        config = toy.config(devices=len(there), **json.loads(asked))
        work = build.planned(config, one_step=False, every_seed=True)
        machine = hardware.MACHINES[chips.machine]
        found = targets.measure(work, 1, chips, machine, kept=kept)
        state, batch = job.placed(work, work.parts(1))
        metrics = jax.eval_shape(work.method.step, state, batch)[1]
    held = [
        list(leaf.shape)
        for name, field in state.extra._asdict().items()
        if "queue" in name or "memory" in name
        for leaf in jax.tree.leaves(field)
        if len(leaf.shape) > 1
    ]
    print(json.dumps(found | {"metrics": len(jax.tree.leaves(metrics)), "held": held}))


if __name__ == "__main__":
    _child(*sys.argv[1:])
