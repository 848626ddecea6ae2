"""`python -m jaxcl.speedup`: how much sooner runs converge than a baseline."""

import sys

from jaxcl.report import speedup

if __name__ == "__main__":
    sys.exit(speedup.main())
