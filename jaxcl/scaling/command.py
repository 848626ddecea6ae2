"""How a run would scale: `python -m jaxcl.scaling --config=configs/pnr_imagenet100.py`.

The step is compiled for each number of devices, without these devices, without data and
without running it. The command prints what the program tells: FLOPs, bytes of state and
batch, and what devices send each other; and from these, estimates for machines whose
peak and links are known. They are no measurements: docs/scaling.md says what they leave
out.
"""

import json
import os
import subprocess
import sys

import jax
from absl import flags, logging
from ml_collections import config_flags

from jaxcl.config import build, command
from jaxcl.data import storage
from jaxcl.scaling import collectives, compiled, hardware, tables


def define_flags(
    values: flags.FlagValues = flags.FLAGS, argv: list[str] | None = None
) -> None:
    """Define the flags; not at import, since other commands define --config, too."""
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


def counts(devices: list[str]) -> list[int]:
    """The value of --devices as numbers, the fewest first."""
    wrong = [x for x in devices if not (x.strip().isdigit() and int(x))]
    if wrong or not devices:
        raise ValueError(
            f"--devices={','.join(devices)}: must be numbers from 1, as 1,8,64"
        )
    return sorted({int(x) for x in devices})


def chosen(values: flags.FlagValues) -> dict[str, hardware.Machine]:
    """The machines of --machine, with fields that other flags override."""
    fields = {
        field: getattr(values, field)
        for field in ("bandwidth", "outside", "latency", "island")
        if getattr(values, field) is not None
    }
    if values.peak_flops is not None:
        fields |= {"peak": values.peak_flops, "peak_float32": values.peak_flops}
    unknown = [name for name in values.machine if name not in hardware.MACHINES]
    if unknown or not values.machine:
        raise ValueError(
            f"--machine={','.join(values.machine)}: must be of "
            f"{', '.join(hardware.MACHINES)}"
        )
    return {name: hardware.MACHINES[name]._replace(**fields) for name in values.machine}


def one(values: flags.FlagValues, number: int) -> dict:
    """`compiled.measure` for `number` of this process's devices."""
    config = values.config
    with config.unlocked(), config.ignore_type():
        config.devices = number
        if values.per_device_batch is not None:
            config.batch_size = number * values.per_device_batch
    raw = config.to_dict()
    sections = (raw.get(name, {}) for name in ("data", "scenario", "augment"))
    size = {name: getattr(values, name) for name in ("classes", "rows", "pixels")}
    work = build.planned(config, compiled.blank(*sections, **size))
    return compiled.measure(work, min(values.task, len(work.stream.tasks) - 1))


def _elsewhere(argv, number, timeout) -> dict | int:
    """`one` in a new process with `number` devices; its exit code if it fails."""
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


def estimates(
    measured: list[dict], setting: tables.Setting
) -> dict[str, list[hardware.Estimate]]:
    """For each machine, the estimates for each number of devices."""
    options = {"utilisation": setting.utilisation, "precision": setting.precision}
    sent = [collectives.restored(program["collectives"]) for program in measured]
    return {
        name: [
            hardware.estimate(program["flops"], messages, machine, **options)
            for program, messages in zip(measured, sent, strict=True)
        ]
        for name, machine in setting.machines.items()
    }


def main(argv: list[str]) -> int:
    """Run the command; 2: it or the config is wrong, 1: a compilation failed."""
    values = flags.FLAGS
    if len(argv) > 1:
        return command.complain(f"unknown argument {argv[1]!r}; see --help")
    logging.set_verbosity(logging.WARNING)
    try:
        numbers, setting = counts(values.devices), _setting(values)
        if values.one is not None:
            print(json.dumps(one(values, values.one)), flush=True)
            return 0
        measured = []
        for number in numbers:
            print(f"compiling, devices: {number}", file=sys.stderr, flush=True)
            measured.append(_elsewhere(sys.argv[1:], number, values.timeout))
            if isinstance(measured[-1], int):
                return measured[-1]
        estimated = estimates(measured, setting)
        print(tables.text(measured, estimated, setting))
        if values.json:
            _write(values.json, measured, estimated, setting)
    except (ValueError, OSError) as error:
        return command.complain(error)
    except subprocess.TimeoutExpired:
        return command.complain(
            f"{number} devices: not compiled in {values.timeout} s; "
            "--timeout=SECONDS gives it longer",
            code=1,
        )
    return 0


def _setting(values) -> tables.Setting:
    """What the flags and their config ask for."""
    raw = values.config.to_dict()
    return tables.Setting(
        name=raw.get("name", "run"),
        precision=raw.get("precision", "float32"),
        weak=values.per_device_batch is not None,
        utilisation=values.utilisation,
        machines=chosen(values),
    )


def _write(path, measured, estimated, setting) -> None:
    """Write all numbers as JSON."""
    rows = zip(*estimated.values(), strict=True)
    times = [
        {
            name: time._asdict() | {"fast": time.fast, "slow": time.slow}
            for name, time in zip(estimated, row, strict=True)
        }
        for row in rows
    ]
    numbers = {
        "name": setting.name,
        "jax": jax.__version__,
        "utilisation": setting.utilisation,
        "precision": setting.precision,
        "machines": {name: m._asdict() for name, m in setting.machines.items()},
        "counts": [x | {"seconds": t} for x, t in zip(measured, times, strict=True)],
    }
    storage.write_json(path, numbers)
