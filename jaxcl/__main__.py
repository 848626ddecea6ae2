"""`python -m jaxcl`: all commands by one name, as `jaxcl`."""

import sys

from jaxcl.front import command

if __name__ == "__main__":
    sys.exit(command.main())
