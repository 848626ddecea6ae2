"""`python -m jaxcl.export`: the encoder of a run, as a folder."""

import sys

from jaxcl.export import command

if __name__ == "__main__":
    sys.exit(command.main())
