"""List the functions of jaxcl that run while Python traces one training step.

A reader of the step reads these. A lambda counts with the function that holds it.
  python benchmarks/functions_of_a_step.py pnr_cifar100 er_ace_cifar10
  python benchmarks/functions_of_a_step.py pnr_cifar100 --building

With `--building` it lists those that make the job from its config.
"""

import argparse
import contextlib
import inspect
import pathlib
import runpy
import sys
import tempfile

import jax

from jaxcl import sharding
from jaxcl.config import build, files, jobs, resolve, sections
from jaxcl.run import job

ROOT = f"{pathlib.Path(sharding.__file__).parent}/"


@contextlib.contextmanager
def list_entered():
    """Yield a list that has (file, function) of all that ran, once the context ends."""
    found, listed = set(), []

    def enter(frame, event, _):
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and path.startswith(ROOT) and not name.endswith(">"):
            found.add((path[len(ROOT) :], name))

    sys.setprofile(enter)
    try:
        yield listed
    finally:
        sys.setprofile(None)
        listed += sorted(found)


def list_functions(config: str, building: bool = False) -> list[tuple[str, str]]:
    """List (file, function) of a step in debug sizes, of a config in configs/.

    Args:
      config: name of a file in configs/.
      building: list what builds the job, in place of its step.
    """
    made = runpy.run_path(files.locate(config))["get_config"]("debug")
    folder = pathlib.Path(tempfile.mkdtemp())
    if building:
        raw = made.to_dict()
        with list_entered() as found:
            jobs.make_job(sections.read_top(resolve.resolve(raw)), raw, folder)
        return found
    work = build.build(made, folder)
    step = inspect.unwrap(work.method.step)  # of what `build` has traced, and kept
    shapes = job.placed_shapes(
        work.method, work.data, work.mesh, work.batches_per_step(0)
    )
    with sharding.use_mesh(work.mesh), list_entered() as found:
        jax.eval_shape(step, *shapes)
    return found


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("configs", nargs="+", help="names of files in configs/")
    made.add_argument("--building", action="store_true", help="of the job, not a step")
    return made


def main(argv=None) -> dict:
    """Print the functions; return how many each config has."""
    asked = parser().parse_args(argv)
    found = {x: list_functions(x, asked.building) for x in asked.configs}
    for config, functions in found.items():
        print(*("  ".join(x) for x in functions), sep="\n")
        print(config, len(functions), "functions in", len(dict(functions)), "files")
    return {config: len(functions) for config, functions in found.items()}


if __name__ == "__main__":
    main()
