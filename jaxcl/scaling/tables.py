"""The tables of `jaxcl.scaling`."""

import collections
from typing import NamedTuple

import jax

from jaxcl.scaling import collectives, hardware

LARGEST = 5  # number of messages that are named


class Setting(NamedTuple):
    """What the flags and the config ask for."""

    name: str  # of the config
    precision: str
    weak: bool  # the batch of each device is fixed, not the batch of all
    utilisation: float
    machines: dict[str, hardware.Machine]


def text(
    measured: list[dict],
    estimated: dict[str, list[hardware.Estimate]],
    setting: Setting,
) -> str:
    """All numbers, as markdown.

    Args:
      measured: from `compiled.measure`, for each number of devices, the fewest first.
      estimated: from `command.estimates`.
    """
    first = measured[0]
    batch = "for each device" if setting.weak else "in all"
    tasks = "a later task" if first["task"] else "the first task"
    examples = first["batch_size"] // (first["devices"] if setting.weak else 1)
    about = (
        f"{setting.name}, {tasks}: a step of {examples} examples {batch}, "
        f"{setting.precision}"
    )
    blocks = [about, f"Compiled for CPUs by jax {jax.__version__}, nothing was run."]
    blocks.append(_table("devices", measured, _program(measured)))
    blocks.append(_largest(measured[-1]))
    for name, machine in setting.machines.items():
        rows = _times(measured, estimated[name], machine)
        blocks.append(_table(f"if it were {name}", measured, rows))
    blocks.append(_assumed(setting, measured))
    return "\n\n".join(block for block in blocks if block)


def _table(title, measured, rows) -> str:
    """A table with a column for each number of devices; rows are (name, cells)."""
    head = [title, *(f"{program['devices']:,}" for program in measured)]
    lines = [head, *([name, *cells] for name, cells in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    ruled = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join(_row(line, widths) for line in [head, ruled, *lines[1:]])


def _row(cells, widths) -> str:
    first, *others = zip(cells, widths, strict=True)
    shown = [first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in others)]
    return "| " + " | ".join(shown) + " |"


def _number(value) -> str:
    """About three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _millions(values) -> list[str]:
    return [_number(value / 1e6) for value in values]


def _program(measured):
    """Rows (name, cells) with the numbers of the programs."""
    share = [program["batch_size"] / program["devices"] for program in measured]
    yield "examples of a device", [_number(x) for x in share]
    yield "GFLOP of a device", [_number(x["flops"] / 1e9) for x in measured]
    yield "times an even share", [_times_even_share(x) for x in measured]
    yield from _sizes(measured)
    sent = [collectives.restored(program["collectives"]) for program in measured]
    for kind in collectives.KINDS:
        alike = [[x for x in messages if x.kind == kind] for messages in sent]
        if any(alike):
            yield f"{kind}, messages", [f"{sum(x.times for x in y):,}" for y in alike]
            yield f"{kind}, MB", _millions(_bytes(y) for y in alike)
    for waits, name in ((True, "MB waited for"), (False, "MB beside the arithmetic")):
        yield name, _millions(_bytes(messages, waits) for messages in sent)


def _sizes(measured):
    """Rows (name, cells) with the bytes on a device."""
    states = [program["state"] for program in measured]
    yield "state, MB", _millions(sum(state.values()) for state in states)
    for name in states[0]:
        sizes = [state[name] for state in states]
        if max(sizes) >= 5e4 or max(sizes) >= 0.01 * sum(states[0].values()):
            yield f"- {name}", _millions(sizes)
    if any(program["images"] for program in measured):
        yield "images of the set, MB", _millions(x["images"] for x in measured)
    yield "batch, MB", _millions(program["batch"] for program in measured)
    temporaries = (program["memory"]["temporaries"] for program in measured)
    yield "temporaries as on CPU, MB", _millions(temporaries)


def _times_even_share(program) -> str:
    """FLOPs of a device, relative to an even share of those of the step as written."""
    written = program["flops_written"]
    return f"{program['flops'] * program['devices'] / written:.2f}" if written else "-"


def _bytes(sent, waits=None) -> int:
    """Bytes of all parts; of those with this `waits` unless it is None."""
    return sum(
        message.times * part.bytes
        for message in sent
        for part in message.parts
        if waits in (None, part.waits)
    )


def _largest(program) -> str:
    """The largest parts of messages; parts of the same name are added up."""
    sizes = collections.Counter()
    for message in collectives.restored(program["collectives"]):
        for part in message.parts:
            name = part.name.removeprefix("jit(several)/") or "no name"
            sizes[message.kind, name] += message.times * part.bytes
    if not sizes:
        return ""
    lines = [f"Most is sent on {program['devices']:,} devices by"]
    for (kind, name), size in sizes.most_common(LARGEST):
        lines.append(f"- {_number(size / 1e6)} MB, {kind}: `{name}`")
    return "\n".join(lines)


def _times(measured, estimated, machine):
    """Rows (name, cells) with the estimates for a machine."""
    yield "arithmetic, ms", [_number(1e3 * x.compute) for x in estimated]
    yield "communication waited for, ms", [_number(1e3 * x.waited) for x in estimated]
    yield "communication beside, ms", [_number(1e3 * x.beside) for x in estimated]
    yield "step, ms", [_span(1e3 * x.fast, 1e3 * x.slow) for x in estimated]
    share = [program["batch_size"] / program["devices"] for program in measured]
    rates = [
        [
            100 * hardware.efficiency(part, share[0], bound(time), bound(estimated[0]))
            for time, part in zip(estimated, share, strict=True)
        ]
        for bound in (lambda x: x.slow, lambda x: x.fast)
    ]
    yield "efficiency, %", [_span(*sorted(x)) for x in zip(*rates, strict=True)]
    held = [sum(x["state"].values()) + x["images"] + x["batch"] for x in measured]
    percent = [_number(100 * x / machine.memory) for x in held]
    yield "memory without temporaries, %", percent


def _span(low, high) -> str:
    """Both numbers, or one if they read the same."""
    low, high = _number(low), _number(high)
    return low if low == high else f"{low} to {high}"


def _assumed(setting, measured) -> str:
    """The assumptions of the estimates, each in a line."""
    lines = ["Estimates, not measurements. Assumed:"]
    for name, m in setting.machines.items():
        peak = m.peak if setting.precision == "bfloat16" else m.peak_float32
        links = f"{m.bandwidth / 1e9:g} GB/s"
        if m.island:
            outside = m.outside or m.bandwidth
            links += f" among {m.island}, {outside / 1e9:g} GB/s to others"
        lines.append(
            f"- {name}: {setting.utilisation:g} of {peak / 1e12:g} TFLOP/s, {links}, "
            f"{m.latency * 1e6:g} us a hop"
        )
    first = measured[0]["devices"]
    lines += [
        f"- efficiency is against {first} device{'s' if first > 1 else ''}; the lower "
        "bound has nothing overlap, the upper all that can",
        "- temporaries are XLA's for CPUs, where bfloat16 is computed in float32; GPUs "
        "and TPUs fuse otherwise",
    ]
    messages = [message for x in measured for message in x["collectives"]]
    unknown = sum(not message["counted"] for message in messages)
    if unknown:
        lines.append(f"- {unknown} messages are in loops of unknown length, once each")
    return "\n".join(lines)
