"""`python -m jaxcl.compare`: runs side by side."""

import sys

from jaxcl.report import compare

if __name__ == "__main__":
    sys.exit(compare.main())
