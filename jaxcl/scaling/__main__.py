"""`python -m jaxcl.scaling`: how a run would scale."""

from absl import app

from jaxcl.config import command as shared
from jaxcl.scaling import command

if __name__ == "__main__":
    command.define_flags()
    app.run(command.main, flags_parser=shared.parse_flags)
