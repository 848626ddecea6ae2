"""Run a config: `python -m jaxcl.main --config=configs/quickstart.py`.

Options are overridden as `--config.method.temperature=0.1`. Give the command again to
resume an interrupted run. If `config.checkpoint` names a run, its encoder is evaluated
and nothing is trained, see configs/transfer.py. Exit codes: 0 finished, 1 failed, 2 the
command or config is wrong, 70 a bug of jaxcl, 75 stopped by a signal and saved.
"""

import argparse
import sys

from jaxcl import cli


def add_options(parser: cli.Parser) -> None:
    """Add the options of `jaxcl train`."""
    parser.epilog = """examples:
  jaxcl train quickstart
  jaxcl train quickstart --workdir=runs/finetune --config.method.name=finetune
  jaxcl train own_images:my_folder,encoder=vit_small --config.epochs=50

The same command continues a run that was stopped.
exit codes: 0 finished, 1 failed, 2 wrong command or config, 75 stopped and saved"""
    parser.add_config()
    for name, text in (
        ("seed", "seed of all random draws (0)"),
        ("seeds", "number of runs, with consecutive seeds (1)"),
        ("epochs", "epochs of each task (the config's)"),
        ("batch_size", "images in a step (the config's)"),
    ):
        parser.add_override(f"config.{name}", text)
    add = parser.add_argument
    add("--workdir", metavar="FOLDER", help="run folder (runs/NAME of the config)")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0 of several")
    add("--processes", type=int, metavar="N", help="number of processes (JAX finds it)")
    add("--process", type=int, metavar="K", help="number of this process, from 0")


def main(options: argparse.Namespace) -> int:
    """Build the job, run it, and leave results and plots."""
    import jax  # seconds, which --help can do without

    from jaxcl import sharding
    from jaxcl.config import build, command, files
    from jaxcl.run import finish

    config = files.read_config(options.config)
    sharding.initialize(options.coordinator, options.processes, options.process)

    def make():
        workdir = options.workdir or build.default_workdir(config)
        return build.build(config, workdir), workdir

    def work(run, stop):
        finish.run_job(*run, stop=stop)
        if jax.process_index() == 0:
            print(f"\n{finish.closing(*run)}", flush=True)

    return command.run_until_signal(make, work)


if __name__ == "__main__":
    sys.exit(cli.main(["train", *sys.argv[1:]]))
