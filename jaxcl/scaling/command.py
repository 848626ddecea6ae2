"""How a run would scale: `python -m jaxcl.scaling --config=configs/pnr_imagenet100.py`.

The step is compiled for each number of devices, without them, without data and without
running it. Told is what the program says: FLOPs, bytes of state and batch, and what
devices send each other; and what follows for machines whose peak and links are known.
Estimates, not measurements: see docs/scaling.md for what they leave out.
"""

import json
import os
import subprocess
import sys

import jax
from absl import flags, logging
from etils import epath
from ml_collections import config_flags

from jaxcl.config import build, command
from jaxcl.scaling import collectives, compiled, hardware, tables


def define_flags(values=flags.FLAGS, argv=None) -> None:
    """The command's flags; not at import, for other commands have a config too."""
    own = {"flag_values": values}
    config_flags.DEFINE_config_file(
        "config",
        None,
        "Config file.",
        lock_config=False,
        accept_new_attributes=True,
        sys_argv=argv,
        **own,
    )
    flags.mark_flag_as_required("config", **own)
    flags.DEFINE_list("devices", "1,8,64,256", "Numbers of devices.", **own)
    flags.DEFINE_integer(
        "per_device_batch",
        None,
        "Rows of each device; else config.batch_size in all.",
        lower_bound=1,
        **own,
    )
    flags.DEFINE_integer("task", 1, "Number of the task, from 0.", 0, **own)
    for name, what in (
        ("classes", "Classes of the data set, which is not read."),
        ("rows", "Its train rows."),
        ("pixels", "Side of its images, where they live on the devices."),
        ("island", "Devices that --bandwidth connects; others by --outside."),
        ("one", "Print what one number of devices takes, as JSON."),
    ):
        flags.DEFINE_integer(name, None, what, 1, **own)
    flags.DEFINE_list(
        "machine", "tpu-v5e,h100", f"Of {', '.join(hardware.MACHINES)}.", **own
    )
    flags.DEFINE_float("utilisation", 0.3, "Share of the peak.", 1e-6, 1.0, **own)
    for name, what in (
        ("peak_flops", "FLOP/s of a device, in place of the machine's."),
        ("bandwidth", "Bytes/s that a device sends, in place of the machine's."),
        ("outside", "Bytes/s that it sends out of its island."),
        ("latency", "Seconds of a hop."),
    ):
        flags.DEFINE_float(name, None, what, 1e-12, **own)
    flags.DEFINE_integer("timeout", 480, "Seconds for each compilation.", 1, **own)
    flags.DEFINE_string("json", None, "A file for all numbers.", **own)


def counts(given: list[str]) -> list[int]:
    """--devices as numbers, the fewest first."""
    wrong = [x for x in given if not (x.strip().isdigit() and int(x))]
    if wrong or not given:
        raise ValueError(
            f"--devices={','.join(given)}: must be numbers from 1, as 1,8,64"
        )
    return sorted({int(x) for x in given})


def chosen(given) -> dict[str, hardware.Machine]:
    """The machines of --machine, with what flags override."""
    own = {
        field: getattr(given, field)
        for field in ("bandwidth", "outside", "latency", "island")
        if getattr(given, field) is not None
    }
    if given.peak_flops is not None:
        own |= {"peak": given.peak_flops, "peak_float32": given.peak_flops}
    unknown = [name for name in given.machine if name not in hardware.MACHINES]
    if unknown or not given.machine:
        raise ValueError(
            f"--machine={','.join(given.machine)}: must be of "
            f"{', '.join(hardware.MACHINES)}"
        )
    return {name: hardware.MACHINES[name]._replace(**own) for name in given.machine}


def one(given, number: int) -> dict:
    """What the step takes on so many of this process's devices, see `measure`."""
    config = given.config
    with config.unlocked(), config.ignore_type():
        config.devices = number
        if given.per_device_batch is not None:
            config.batch_size = number * given.per_device_batch
    raw = config.to_dict()
    sections = (raw.get(name, {}) for name in ("data", "scenario", "augment"))
    size = {name: getattr(given, name) for name in ("classes", "rows", "pixels")}
    work = build.planned(config, compiled.blank(*sections, **size))
    return compiled.measure(work, min(given.task, len(work.stream.tasks) - 1))


def _elsewhere(argv, number, timeout) -> dict | int:
    """`one` in a process of its own with so many devices; its exit code if it fails."""
    fake = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(number)}
    ran = subprocess.run(
        [sys.executable, "-m", "jaxcl.scaling", *argv, f"--one={number}"],
        env=os.environ | fake,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
    )
    if ran.returncode:
        return ran.returncode
    return json.loads(ran.stdout.splitlines()[-1])


def estimates(found: list[dict], setting: tables.Setting) -> dict[str, list]:
    """A `hardware.Estimate` for each machine and number of devices."""
    options = {"utilisation": setting.utilisation, "precision": setting.precision}
    sent = [collectives.restored(each["collectives"]) for each in found]
    return {
        name: [
            hardware.estimate(each["flops"], some, machine, **options)
            for each, some in zip(found, sent, strict=True)
        ]
        for name, machine in setting.machines.items()
    }


def main(argv) -> int:
    """The command; 2 where it or the config is wrong, 1 where a compilation fails."""
    given = flags.FLAGS
    if len(argv) > 1:
        return command.complain(f"unknown argument {argv[1]!r}; see --help")
    logging.set_verbosity(logging.WARNING)
    try:
        numbers, setting = counts(given.devices), _setting(given)
        if given.one is not None:
            print(json.dumps(one(given, given.one)), flush=True)
            return 0
        found = []
        for number in numbers:
            print(f"compiling, devices: {number}", file=sys.stderr, flush=True)
            found.append(_elsewhere(sys.argv[1:], number, given.timeout))
            if isinstance(found[-1], int):
                return found[-1]
        made = estimates(found, setting)
        print(tables.text(found, made, setting))
        if given.json:
            _write(given.json, found, made, setting)
    except (ValueError, OSError) as error:
        return command.complain(error)
    except subprocess.TimeoutExpired:
        return command.complain(
            f"{number} devices: not compiled in {given.timeout} s; "
            "--timeout=SECONDS gives it longer",
            code=1,
        )
    return 0


def _setting(given) -> tables.Setting:
    raw = given.config.to_dict()
    return tables.Setting(
        name=raw.get("name", "run"),
        precision=raw.get("precision", "float32"),
        weak=given.per_device_batch is not None,
        utilisation=given.utilisation,
        machines=chosen(given),
    )


def _write(path, found, made, setting) -> None:
    rows = zip(*made.values(), strict=True)
    times = [
        {
            name: each._asdict() | {"fast": each.fast, "slow": each.slow}
            for name, each in zip(made, row, strict=True)
        }
        for row in rows
    ]
    whole = {
        "name": setting.name,
        "jax": jax.__version__,
        "utilisation": setting.utilisation,
        "precision": setting.precision,
        "machines": {name: m._asdict() for name, m in setting.machines.items()},
        "counts": [x | {"seconds": t} for x, t in zip(found, times, strict=True)],
    }
    epath.Path(path).write_text(json.dumps(whole, indent=1) + "\n")
