"""`python -m jaxcl.report`: one page about runs."""

import sys

from jaxcl.report import page

if __name__ == "__main__":
    sys.exit(page.main())
