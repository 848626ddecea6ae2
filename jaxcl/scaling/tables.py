"""The tables of `jaxcl.scaling`."""

import collections
from typing import NamedTuple

import jax

from jaxcl.scaling import collectives, hardware

LARGEST = 5  # messages that are named


class Setting(NamedTuple):
    """What the numbers hold for."""

    name: str  # of the config
    precision: str
    weak: bool  # the batch of each device is fixed, not that of all
    utilisation: float
    machines: dict[str, hardware.Machine]


def text(found: list[dict], made: dict[str, list], setting: Setting) -> str:
    """All that is known, as markdown.

    Args:
      found: from `compiled.measure`, one for each number of devices, the fewest first.
      made: from `scaling.estimates`.
    """
    batch = "for each device" if setting.weak else "in all"
    tasks = "a later task" if found[0]["task"] else "the first task"
    given = found[0]["batch_size"] // (found[0]["devices"] if setting.weak else 1)
    about = (
        f"{setting.name}, {tasks}: a step of {given} examples {batch}, "
        f"{setting.precision}"
    )
    blocks = [about, f"Compiled for CPUs by jax {jax.__version__}, nothing was run."]
    blocks.append(_table("devices", found, _program(found)))
    blocks.append(_largest(found[-1]))
    for name, machine in setting.machines.items():
        rows = _times(found, made[name], machine)
        blocks.append(_table(f"if it were {name}", found, rows))
    blocks.append(_assumed(setting, found))
    return "\n\n".join(block for block in blocks if block)


def _table(title, found, rows) -> str:
    head = [title, *(f"{each['devices']:,}" for each in found)]
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


def _program(found):
    """Rows (name, cells) of what the programs say."""
    share = [each["batch_size"] / each["devices"] for each in found]
    yield "examples of a device", [_number(x) for x in share]
    yield "GFLOP of a device", [_number(each["flops"] / 1e9) for each in found]
    yield "times an even share", [_over(each) for each in found]
    yield "state, MB", _millions(sum(each["state"].values()) for each in found)
    for name in found[0]["state"]:
        sizes = [each["state"][name] for each in found]
        if max(sizes) >= 5e4 or max(sizes) >= 0.01 * sum(found[0]["state"].values()):
            yield f"- {name}", _millions(sizes)
    if any(each["images"] for each in found):
        yield "images of the set, MB", _millions(each["images"] for each in found)
    yield "batch, MB", _millions(each["batch"] for each in found)
    yield (
        "temporaries as on CPU, MB",
        _millions(each["memory"]["temporaries"] for each in found),
    )
    sent = [collectives.restored(each["collectives"]) for each in found]
    for kind in collectives.KINDS:
        some = [[x for x in one if x.kind == kind] for one in sent]
        if any(some):
            yield f"{kind}, messages", [f"{sum(x.times for x in y):,}" for y in some]
            yield f"{kind}, MB", _millions(_bytes(y) for y in some)
    for waits, name in ((True, "MB waited for"), (False, "MB beside the arithmetic")):
        yield name, _millions(_bytes(one, waits) for one in sent)


def _over(each) -> str:
    """FLOPs of a device over its share of those of the step as it is written."""
    written = each["flops_written"]
    return f"{each['flops'] * each['devices'] / written:.2f}" if written else "-"


def _bytes(sent, waits=None) -> int:
    return sum(
        each.times * part.bytes
        for each in sent
        for part in each.parts
        if waits in (None, part.waits)
    )


def _largest(each) -> str:
    """The largest parts of messages, those of one name together."""
    sizes = collections.Counter()
    for one in collectives.restored(each["collectives"]):
        for part in one.parts:
            name = part.name.removeprefix("jit(several)/") or "no name"
            sizes[one.kind, name] += one.times * part.bytes
    if not sizes:
        return ""
    lines = [f"Most is sent on {each['devices']:,} devices by"]
    for (kind, name), size in sizes.most_common(LARGEST):
        lines.append(f"- {_number(size / 1e6)} MB, {kind}: `{name}`")
    return "\n".join(lines)


def _times(found, made, machine):
    """Rows (name, cells) of an estimate."""
    yield "arithmetic, ms", [_number(1e3 * x.compute) for x in made]
    yield "communication waited for, ms", [_number(1e3 * x.waited) for x in made]
    yield "communication beside, ms", [_number(1e3 * x.beside) for x in made]
    yield "step, ms", [_span(1e3 * x.fast, 1e3 * x.slow) for x in made]
    share = [each["batch_size"] / each["devices"] for each in found]
    rates = [
        [
            100 * hardware.efficiency(part, share[0], at(one), at(made[0]))
            for one, part in zip(made, share, strict=True)
        ]
        for at in (lambda x: x.slow, lambda x: x.fast)
    ]
    yield "efficiency, %", [_span(*sorted(x)) for x in zip(*rates, strict=True)]
    held = [sum(x["state"].values()) + x["images"] + x["batch"] for x in found]
    yield (
        "memory without temporaries, %",
        [_number(100 * x / machine.memory) for x in held],
    )


def _span(low, high) -> str:
    low, high = _number(low), _number(high)
    return low if low == high else f"{low} to {high}"


def _assumed(setting, found) -> str:
    """The assumptions of the estimates, a line each."""
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
    first = found[0]["devices"]
    lines += [
        f"- efficiency is against {first} device{'s' if first > 1 else ''}; the lower "
        "bound has nothing overlap, the upper all that can",
        "- temporaries are XLA's for CPUs, where bfloat16 is computed in float32; GPUs "
        "and TPUs fuse otherwise",
    ]
    unknown = sum(not x["counted"] for each in found for x in each["collectives"])
    if unknown:
        lines.append(f"- {unknown} messages are in loops of unknown length, once each")
    return "\n".join(lines)
