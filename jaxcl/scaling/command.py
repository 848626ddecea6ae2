"""How a run would scale: `python -m jaxcl.scaling --config=configs/pnr_imagenet100.py`.

The step is compiled for each number of devices, without these devices, without data and
without running it. The command prints what the program tells: FLOPs, bytes of state and
batch, and what devices send each other; and from these, estimates for machines whose
peak and links are known. With `--target=v5e:2x4,h200:8` the compiler of these chips
makes the program, where it is installed. They are no measurements: docs/scaling.md says
what they leave out.
"""

import json
import os
import subprocess
import sys

import jax
from absl import flags, logging
from ml_collections import config_flags

from jaxcl import sharding
from jaxcl.config import build, command, sections
from jaxcl.data import storage, stream
from jaxcl.scaling import collectives, compiled, hardware, tables, targets


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
    flags.DEFINE_multi_string(
        "target",
        None,
        "Chips whose own compiler makes the program: v5e:2x4, h200:8. Several with "
        "commas between, or the flag several times.",
        **own,
    )
    flags.DEFINE_bool(
        "largest_batch", False, "Search the largest batch that fits a target.", **own
    )
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
        ("memory_bandwidth", "Bytes/s of a target's own memory."),
    ):
        flags.DEFINE_float(name, None, what, 1e-12, **own)
    flags.DEFINE_float(
        "launch", None, "Seconds that a target's kernel takes at least.", 0.0, **own
    )
    flags.DEFINE_string("one_target", None, "As --one, of a target.", **own)
    flags.DEFINE_integer(
        "timeout",
        None,
        "Seconds for each compilation; 480, for a target 3600.",
        1,
        **own,
    )
    flags.DEFINE_string(
        "kept", None, "A folder where the programs of targets are kept.", **own
    )
    flags.DEFINE_string(
        "known",
        None,
        'A "program" of an earlier --json: a target that makes this one still is not '
        'compiled, and the JSON says "same".',
        **own,
    )
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
    unknown = [name for name in values.machine if name not in hardware.MACHINES]
    if unknown or not values.machine:
        raise ValueError(
            f"--machine={','.join(values.machine)}: must be of "
            f"{', '.join(hardware.MACHINES)}"
        )
    return {name: _overridden(values, name) for name in values.machine}


def _overridden(values, name) -> hardware.Machine:
    """A machine by its name, with fields that flags override."""
    fields = {
        field: getattr(values, field)
        for field in (
            "bandwidth",
            "outside",
            "latency",
            "island",
            "memory_bandwidth",
            "launch",
        )
        if getattr(values, field) is not None
    }
    if values.peak_flops is not None:
        fields |= {"peak": values.peak_flops, "peak_float32": values.peak_flops}
    return hardware.MACHINES[name]._replace(**fields)


def wanted(values: flags.FlagValues) -> list[targets.Target]:
    """The targets of --target.

    Raises:
      ValueError: one is not known.
    """
    texts = [text for given in values.target or () for text in given.split(",")]
    return [targets.parse(text) for text in texts]


def one(values: flags.FlagValues, number: int) -> dict:
    """`compiled.measure` for `number` of this process's devices."""
    work = _planned(values, number)
    return compiled.measure(work, _task(values, work))


def one_target(values: flags.FlagValues, target: targets.Target) -> dict:
    """`targets.measure` for a target."""
    there = targets.devices(target)
    with sharding.for_elsewhere(there):
        work = _planned(values, len(there), one_step=False)
        machine = _overridden(values, target.machine)
        task = _task(values, work)
        return targets.measure(
            work, task, target, machine, kept=values.kept, known=values.known
        )


def _planned(values, number, **options):
    """The job of the config on a number of devices, of all seeds that go side by side.

    Data are blank.
    """
    config = values.config
    with config.unlocked(), config.ignore_type():
        config.devices, config.precision = number, _precision(config.to_dict())
        if values.per_device_batch is not None:
            config.batch_size = number * values.per_device_batch
    return build.planned(config, stand_in(values), every_seed=True, **options)


def stand_in(values: flags.FlagValues) -> stream.Dataset | None:
    """`compiled.blank` of the config and of the sizes that flags say."""
    raw = values.config.to_dict()
    sections = (raw.get(name, {}) for name in ("data", "scenario", "augment"))
    size = {name: getattr(values, name) for name in ("classes", "rows", "pixels")}
    return compiled.blank(*sections, **size)


def _precision(raw) -> str:
    """config.precision, "auto" as on the accelerators that all this is about."""
    given = raw.get("precision", "float32")
    with sharding.for_elsewhere():
        return sections.precision_of(raw) if given == "auto" else given


def _task(values, work) -> int:
    return min(values.task, len(work.stream.tasks) - 1)


def _elsewhere(argv, number, timeout) -> dict | int:
    """`one` in a new process with `number` devices; its exit code if it fails."""
    fake = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(number)}
    return _child([*argv, f"--one={number}"], fake, timeout, f"{number} devices")


def _child(argv, environment, timeout, what) -> dict | int:
    """What a process of this command says last, as JSON; its exit code if it fails.

    Raises:
      TimeoutError: it takes longer than `timeout` seconds; `what` is what it compiles.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "jaxcl.scaling", *argv],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as late:
        raise TimeoutError(
            f"{what}: not compiled in {timeout} s; --timeout=SECONDS gives it longer"
        ) from late
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
        asked = wanted(values)
        if values.one_target is not None:
            found = one_target(values, targets.parse(values.one_target))
            print(json.dumps(found), flush=True)
            return 0
        if values.one is not None:  # before --target, which a child is given, too
            print(json.dumps(one(values, values.one)), flush=True)
            return 0
        if asked:
            return _on_targets(values, asked)
        return _on_devices(values, counts(values.devices))
    except TimeoutError as error:
        return command.complain(error, code=1)
    except (ValueError, OSError) as error:
        return command.complain(error)


def _on_devices(values, numbers, machine=None) -> int:
    """The program that XLA makes for CPUs, and what it would take on machines.

    Args:
      numbers: of devices, the fewest first.
      machine: in place of --machine; nothing is written then.
    """
    setting = _setting(values, machine)
    measured = []
    for number in numbers:
        print(f"compiling, devices: {number}", file=sys.stderr, flush=True)
        measured.append(_elsewhere(sys.argv[1:], number, values.timeout or 480))
        if isinstance(measured[-1], int):
            return measured[-1]
    estimated = estimates(measured, setting)
    print(tables.text(measured, estimated, setting))
    if values.json and machine is None:
        _write(values.json, measured, estimated, setting)
    return 0


def _on_targets(values, asked) -> int:
    """The programs of the targets' own compilers, or of XLA for CPUs."""
    found: list[dict] = []
    absent = []
    for target in asked:
        lacks = targets.missing(target)
        if lacks:
            absent.append((target, lacks))
            continue
        compiled_for = _for_target(values, target)
        if isinstance(compiled_for, int):
            return compiled_for
        found.append(compiled_for)
    others = [x for x in found if not x.get("same")]
    if others:
        print(tables.of_targets(others, _setting(values)))
    if values.json:
        storage.write_json(values.json, {"jax": jax.__version__, "targets": found})
    for target, lacks in absent:
        print(
            f"\n{target.text}: its compiler is not installed ({lacks}). Here is the "
            "program that XLA makes for CPUs instead.\n"
        )
        code = _on_devices(values, [target.chips], target.machine)
        if code:
            return code
    return 0


def _for_target(values, target) -> dict | int:
    """What a process found out about a target; its exit code if it fails."""

    def ask(*more):
        print(f"compiling for {target.text}", *more, file=sys.stderr, flush=True)
        argv = [*sys.argv[1:], *more, f"--one_target={target.text}"]
        timeout = values.timeout or 3600
        return _child(argv, targets.ENVIRONMENT, timeout, target.text)

    found = ask()
    if isinstance(found, int) or found.get("same") or not values.largest_batch:
        return found
    devices = found["devices"]
    first = max(found["batch_size"] // devices, 1)
    known = {first: found["fits"]}

    def fits(rows):
        if rows not in known:
            told = ask(f"--per_device_batch={rows}")
            # A task with fewer rows than the batch is refused, which ends the search.
            known[rows] = not isinstance(told, int) and told["fits"]
        return known[rows]

    return found | {"largest_batch": devices * targets.largest(fits, first)}


def _setting(values, machine=None) -> tables.Setting:
    """What the flags and their config ask for; a machine may replace --machine."""
    raw = values.config.to_dict()
    machines = {machine: _overridden(values, machine)} if machine else chosen(values)
    return tables.Setting(
        name=raw.get("name", "run"),
        precision=_precision(raw),
        weak=values.per_device_batch is not None,
        utilisation=values.utilisation,
        machines=machines,
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
