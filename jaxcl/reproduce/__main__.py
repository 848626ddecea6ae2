"""`python -m jaxcl.reproduce`: a published number, and ours beside it."""

import sys

from jaxcl.reproduce import command

if __name__ == "__main__":
    sys.exit(command.main())
