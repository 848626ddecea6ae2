"""`python -m tests.attack`, from the root of the repository."""

import pathlib
import sys

# As pytest does: `attack` and `helpers` are packages of their own.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from attack import command  # noqa: E402

sys.exit(command.main())
