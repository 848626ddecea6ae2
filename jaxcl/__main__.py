"""`python -m jaxcl`: all commands by one name, as `jaxcl`."""

import sys

from jaxcl import cli

if __name__ == "__main__":
    sys.exit(cli.main())
