"""Run a config: `python -m jaxcl.main --config=configs/quickstart.py`.

Options are overridden as `--config.method.temperature=0.1`. Give the command again to
resume an interrupted run. If `config.checkpoint` names a run, its encoder is evaluated
and nothing is trained, see configs/transfer.py. Exit codes: 0 finished, 1 failed, 2 the
command or config is wrong, 70 a bug of jaxcl, 75 stopped by a signal and saved.
"""

import jax
from absl import app, flags
from ml_collections import config_flags

from jaxcl import sharding
from jaxcl.config import build, command
from jaxcl.run import finish

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file.", lock_config=False, accept_new_attributes=True
)
flags.mark_flag_as_required("config")
WORKDIR = flags.DEFINE_string("workdir", None, "Run directory; runs/NAME by default.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
PROCESSES = flags.DEFINE_integer("processes", None, "How many processes there are.")
PROCESS = flags.DEFINE_integer("process", None, "Number of this process.")


def main(argv):
    """Build the job, run it, and leave results and plots."""
    if len(argv) > 1:
        unknown = f"unknown argument {argv[1]!r}; options start with --config."
        return command.complain(unknown)
    sharding.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value)

    def make():
        workdir = WORKDIR.value or build.default_workdir(CONFIG.value)
        return build.build(CONFIG.value, workdir), workdir

    def work(made, stop):
        finish.run_job(*made, stop=stop)
        if jax.process_index() == 0:
            print(f"\n{finish.closing(*made)}", flush=True)

    return command.run_until_signal(make, work)


if __name__ == "__main__":
    app.run(main, flags_parser=command.parse_flags)
