"""`python -m jaxcl.report`: one page about runs."""

import sys

from jaxcl.report import command

if __name__ == "__main__":
    sys.exit(command.main())
