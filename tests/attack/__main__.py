"""`python -m tests.attack`, from the root of the repository."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
# As pytest does: `attack` and `helpers` are packages of their own. Processes that are
# started inherit both.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import environment  # noqa: E402
from attack import command  # noqa: E402

# Python keeps count of what processes that were killed have left.
os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"

if __name__ == "__main__":
    environment.settle(devices=1)
    sys.exit(command.main())
