"""`python -m jaxcl.update`: train a run's encoder on new images."""

import functools

from absl import app

from jaxcl.config import command as shared
from jaxcl.update import command

if __name__ == "__main__":
    command.define_flags()
    parse = functools.partial(shared.parse_flags, section="config.train")
    app.run(command.main, flags_parser=parse)
