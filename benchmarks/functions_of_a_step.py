"""List the functions of jaxcl that run while Python traces one training step.

A reader of the step reads these. A lambda counts with the function that holds it.
  python benchmarks/functions_of_a_step.py pnr_cifar100 er_ace_cifar10
"""

import argparse
import inspect
import pathlib
import runpy
import sys
import tempfile

import jax

from jaxcl import sharding
from jaxcl.config import build, files
from jaxcl.run import job

ROOT = f"{pathlib.Path(sharding.__file__).parent}/"


def list_functions(config: str) -> list[tuple[str, str]]:
    """List (file, function) of a step in debug sizes, of a config in configs/."""
    made = runpy.run_path(files.locate(config))["get_config"]("debug")
    work = build.build(made, pathlib.Path(tempfile.mkdtemp()))
    step = inspect.unwrap(work.method.step)  # of what `build` has traced, and kept
    shapes = job.placed_shapes(work.method, work.data, work.mesh, work.parts(0))
    found = set()

    def enter(frame, event, _):
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and path.startswith(ROOT) and not name.endswith(">"):
            found.add((path[len(ROOT) :], name))

    with sharding.use_mesh(work.mesh):
        sys.setprofile(enter)
        jax.eval_shape(step, *shapes)
        sys.setprofile(None)
    return sorted(found)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("configs", nargs="+", help="names of files in configs/")
    return made


def main(argv=None) -> dict:
    """Print the functions; return how many each config has."""
    found = {x: list_functions(x) for x in parser().parse_args(argv).configs}
    for config, functions in found.items():
        print(*("  ".join(x) for x in functions), sep="\n")
        print(config, len(functions), "functions in", len(dict(functions)), "files")
    return {config: len(functions) for config, functions in found.items()}


if __name__ == "__main__":
    main()
