"""`python -m jaxcl.update`: train a run's encoder on new images."""

from absl import app

from jaxcl.config import command as shared
from jaxcl.update import command

if __name__ == "__main__":
    command.define_flags()
    app.run(command.main, flags_parser=shared.parse_flags)
