"""`python -m jaxcl.bring`: weights of another library, as a folder."""

import sys

from jaxcl.bring import command

if __name__ == "__main__":
    sys.exit(command.main())
