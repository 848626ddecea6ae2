"""`python -m jaxcl.leaderboard`: cost against accuracy of every method."""

import sys

from jaxcl.leaderboard import command

if __name__ == "__main__":
    sys.exit(command.main())
