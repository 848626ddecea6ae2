"""`python -m jaxcl.update`: train a run's encoder on new images."""

import functools

from absl import app

from jaxcl.config import command as shared
from jaxcl.update import command

if __name__ == "__main__":
    parse = functools.partial(
        shared.parse_flags, section="config.train", define=command.define_flags
    )
    app.run(command.main, flags_parser=parse)
