"""Our own kernels, compiled by the compiler of a chip: `streamed`, `selected`.

In a process of its own, as in `on_target`.
"""

import functools
import json
import os
import subprocess
import sys

from helpers import on_target

COLUMNS = 65536
# Rows, columns and the type of the columns.
LOSSES = [
    (256, COLUMNS, "float32"),
    (1024, COLUMNS, "bfloat16"),
    (2000, 3000, "float32"),
]


@functools.cache
def _found(target, *asked):
    from jaxcl.scaling import targets

    environment = os.environ | targets.ENVIRONMENT
    environment["PYTHONPATH"] = f"{on_target.ROOT}:{on_target.ROOT / 'tests'}"
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)
    ran = subprocess.run(
        [sys.executable, "-m", "helpers.kernels_on_target", target, *asked],
        env=environment,
        cwd=on_target.ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def streamed(target: str) -> dict:
    """A loss with its gradient: "plain" and "streamed", one dict for each of LOSSES.

    They have "kernels", "unknown_loops" and the bytes of "temporaries" of one device.
    "sizes" are the rows and the columns of each.
    """
    return _found(target, "streamed")


def selected(target: str, score: str) -> dict:
    """`duel.select` of 2,048 rows and 256 that come, on every device alike."""
    return _found(target, "selected", score)


def _program(function, shapes, mesh, target):
    """What the compiler makes of a function of arrays that every device has whole."""
    import jax

    from jaxcl import sharding
    from jaxcl.scaling import hardware, targets

    whole = sharding.replicated(mesh)
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=whole) for shape in shapes]
    made = jax.jit(function, out_shardings=whole).lower(*arguments).compile()
    found = targets.program(made.as_text(), 1, hardware.MACHINES[target.machine])
    ran = {k: v for k, v in found["kernels"].items() if k != "prefetch"}
    return {
        "kernels": sum(ran.values()),
        "unknown_loops": found["unknown_loops"],
        "temporaries": made.memory_analysis().temp_size_in_bytes,
    }


def _child(text, asked, score="affine"):
    import jax
    import jax.numpy as jnp

    from jaxcl import core, sharding
    from jaxcl.losses import streaming
    from jaxcl.memory import duel
    from jaxcl.scaling import targets

    target = targets.parse(text)

    def plain(anchors, rows, **_):
        return jax.nn.logsumexp(core.dot(anchors, rows.astype(anchors.dtype)), axis=1)

    def loss(form, anchors, rows):
        # The gradient in both, or what nobody asks for is not compiled.
        return jax.grad(lambda *x: jnp.mean(form(*x)), (0, 1))(anchors, rows)

    with sharding.for_elsewhere(targets.devices(target)):
        mesh = sharding.mesh()
        on_each = functools.partial(sharding.on_each, mesh=mesh)
        program = functools.partial(_program, mesh=mesh, target=target)
        if asked == "selected":
            choose = functools.partial(duel.select, score=score, kernel=True)
            shapes = [((n, 256), jnp.float32) for n in (2048, 256)]
            found = program(lambda *rows: on_each(choose, (), rows), shapes)
        else:
            form = functools.partial(streaming.logsumexp, on_each=on_each)
            found = {"plain": [], "streamed": []}
            found["sizes"] = [*zip(*LOSSES, strict=True)][:2]
            for rows, columns, dtype in LOSSES:
                shapes = ((rows, 128), jnp.float32), ((columns, 128), dtype)
                for name, one in (("plain", plain), ("streamed", form)):
                    made = program(functools.partial(loss, one), shapes)
                    found[name].append(made)
    print(json.dumps(found))


if __name__ == "__main__":
    _child(*sys.argv[1:])
