"""List the functions of jaxcl that run while Python traces one training step.

A reader who follows the step reads these: augmentation, networks, loss, optimiser,
memory. A lambda counts with the function that holds it.

  python benchmarks/functions_of_a_step.py pnr_cifar100 er_ace_cifar10
"""

import argparse
import inspect
import pathlib
import runpy
import sys
import tempfile

import jax

import jaxcl
from jaxcl import sharding
from jaxcl.config import build, files
from jaxcl.run import job

ROOT = pathlib.Path(jaxcl.__file__).parent


def list_functions(config: str) -> list[tuple[str, str]]:
    """Trace the step of a config in debug sizes: (file, function) of each one entered.

    Args:
      config: the name of a file in configs/.
    """
    path = files.located(config)
    made = runpy.run_path(path)["get_config"]("debug")
    work = build.build(made, pathlib.Path(tempfile.mkdtemp()))
    step = inspect.unwrap(work.method.step)  # of what `build` has traced, and kept
    shapes = job.placed(work.method, work.data, work.mesh, work.parts(0))
    found = set()

    def enter(frame, event, _):
        code = frame.f_code
        own = event == "call" and code.co_filename.startswith(str(ROOT))
        if own and not code.co_name.startswith("<"):
            found.add((code.co_filename[len(str(ROOT)) + 1 :], code.co_qualname))

    sys.setprofile(enter)
    try:
        with sharding.use(work.mesh):
            jax.eval_shape(step, *shapes)
    finally:
        sys.setprofile(None)
    return sorted(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="+", help="names of files in configs/")
    for config in parser.parse_args().configs:
        functions = list_functions(config)
        print(*(f"{path}  {name}" for path, name in functions), sep="\n")
        count = len({path for path, _ in functions})
        print(f"{config}: {len(functions)} functions in {count} files\n")
