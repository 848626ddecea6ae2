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
    examples = first["batch_size"] // (first["devices"] if setting.weak else 1)
    blocks = [_about(setting, first, f"{examples} examples {batch}")]
    blocks.append(f"Compiled for CPUs by jax {jax.__version__}, nothing was run.")
    blocks.append(_table("devices", measured, _program(measured)))
    blocks.append(_largest(measured[-1]))
    for name, machine in setting.machines.items():
        rows = _times(measured, estimated[name], machine)
        blocks.append(_table(f"if it were {name}", measured, rows))
    blocks.append(_assumed(setting, measured))
    return "\n\n".join(block for block in blocks if block)


def _about(setting, first, examples) -> str:
    """What was compiled; `first` is one of what was measured."""
    task = "a later task" if first["task"] else "the first task"
    count = first["seeds"]
    seeds = f"{count} seeds, each of " if count > 1 else ""
    return f"{setting.name}, {task}: a step of {seeds}{examples}, {setting.precision}"


def of_targets(found: list[dict], setting: Setting) -> str:
    """What the compilers of chips made of a step, as markdown.

    Args:
      found: from `targets.measure`, of each target, perhaps with "largest_batch".
    """
    first = found[0]
    sizes = ", ".join(dict.fromkeys(f"{x['batch_size']:,}" for x in found))
    blocks = [_about(setting, first, f"{sizes} examples in all")]
    made = ", ".join(dict.fromkeys(x["compiler"] for x in found))
    blocks.append(f"Compiled by {made} under jax {jax.__version__}, nothing was run.")
    blocks += [_with_options(x) for x in found if x.get("options")]
    heads = [x["target"] for x in found]
    blocks.append(_ruled(["a step on", *heads], _compiled(found)))
    for each in found:
        blocks.append(_longest(each))
    blocks.append(_assumed_of_targets(found))
    return "\n\n".join(block for block in blocks if block)


def _with_options(found) -> str:
    options = ", ".join(f"{name}={x}" for name, x in found["options"].items())
    return f"For {found['target']} with {options}: without it the compiler fails."


def _compiled(found):
    """Rows (name, cells) with what the programs of targets are."""

    def row(name, value):
        cells = []
        for each in found:
            told = None if "error" in each else value(each)
            cells.append(told if isinstance(told, str) else number(told))
        return name, cells

    yield "chips", [number(x["chips"]) for x in found]
    yield "examples of a chip", [number(x["batch_size"] / x["chips"]) for x in found]
    yield "fits", ["yes" if x["fits"] else "no" for x in found]
    if any("largest_batch" in x for x in found):
        largest = (x.get("largest_batch") for x in found)
        yield "largest batch that fits", [number(x) for x in largest]
    yield row("compiling, s", lambda x: x["seconds"])
    yield row("memory of a device, MB", lambda x: x["memory"]["held"] / 1e6)
    for name in ("arguments", "temporaries", "program"):
        yield row(f"- {name}", lambda x, name=name: x["memory"][name] / 1e6)
    yield row(
        "- results beside the arguments",
        lambda x: (x["memory"]["outputs"] - x["memory"]["aliased"]) / 1e6,
    )
    yield row("of its memory, %", lambda x: 100 * _held(x))
    yield row("XLA's own peak, MB", lambda x: x["memory"]["peak"] / 1e6)
    yield row("kernels", lambda x: sum(x["kernels"].values()))
    kinds = dict.fromkeys(y for x in found for y in x.get("kernels", ()))
    for kind in kinds:
        yield row(f"- {_PLURALS[kind]}", lambda x, kind=kind: x["kernels"].get(kind, 0))
    for kind, plural in (("convolution", "convolutions"), ("product", "products")):
        types = (y for x in found for y in x.get("products", {}).get(kind, ()))
        for dtype in sorted(set(types)):
            yield row(
                f"{plural} in {dtype}",
                lambda x, kind=kind, dtype=dtype: x["products"][kind].get(dtype, 0),
            )
    yield row("grouped convolutions", lambda x: x["grouped"])
    yield row("GFLOP of a device", lambda x: x["flops"] / 1e9)
    yield row("MB to and from its memory", lambda x: x["bytes"] / 1e6)
    for kind in collectives.KINDS:
        if any(_sent(x, kind) for x in found):
            yield row(
                f"{kind}, messages",
                lambda x, kind=kind: sum(y.times for y in _sent(x, kind)),
            )
            yield row(
                f"{kind}, MB",
                lambda x, kind=kind: _bytes(_sent(x, kind)) / 1e6,
            )
    yield row("MB with nothing beside", lambda x: _alone(x) / 1e6)
    yield row("least time, ms", lambda x: 1e3 * sum(x["least"].values()))
    for name in dict.fromkeys(y for x in found for y in x.get("least", ())):
        yield row(
            f"- bound by {name}, %",
            lambda x, name=name: 100 * x["least"][name] / sum(x["least"].values()),
        )
    if any(x.get("cycles") for x in found):
        yield row("by the compiler's cycles, ms", lambda x: _milli(x["cycles"]))


_PLURALS = {
    "convolution": "convolutions",
    "product": "matrix products",
    "copy": "copies",
    "message": "messages",
    "prefetch": "prefetches",
    "other": "others",
}


def _milli(seconds):
    return None if seconds is None else 1e3 * seconds


def _held(found) -> float:
    return found["memory"]["held"] / found["memory"]["limit"]


def _sent(found, kind) -> list[collectives.Collective]:
    sent = collectives.restored(found.get("collectives", []))
    return [message for message in sent if message.kind == kind]


def _alone(found) -> float:
    """Bytes of messages that nothing runs beside."""
    sent = collectives.restored(found["collectives"])
    return sum(message.times * message.bytes for message in sent if not message.beside)


def _longest(found) -> str:
    """The kernels that take longest, and those that copy most."""
    if "error" in found:
        return f"{found['target']}: does not fit. {found['error']}"
    lines = [f"On {found['target']} most time goes to"]
    lines += [
        f"- {x['kind']}, {_often(x)}: `{x['name'] or x['shape']}`"
        for x in found["longest"][:LARGEST]
    ]
    copies = [x for x in found["copies"] if x["bytes"] >= 1e6]
    if copies:
        lines += ["", f"and the largest copies on {found['target']} are"]
    for x in copies[:LARGEST]:
        lines.append(f"- {x['shape']}, {_often(x)}: `{x['name']}`")
    return "\n".join(lines)


def _often(kernel) -> str:
    return f"{kernel['times']:g} times, {number(kernel['bytes'] / 1e6)} MB"


def _assumed_of_targets(found) -> str:
    """What the least time rests on, each in a line."""
    lines = ["Bounds, not measurements. Assumed:"]
    for name in dict.fromkeys(x["machine"] for x in found):
        m = next(x for x in found if x["machine"] == name)["peaks"]
        rates = f"{m['peak'] / 1e12:g} TFLOP/s, {m['peak_float32'] / 1e12:g} in float32"
        memory = f"{m['memory_bandwidth'] / 1e9:g} GB/s of memory"
        links = f"{m['bandwidth'] / 1e9:g} GB/s to others"
        launch = f"{m['launch'] * 1e6:g} us a kernel, {m['latency'] * 1e6:g} us a hop"
        lines.append(f"- {name}: {rates}, {memory}, {links}, {launch}")
    lines.append(
        "- a kernel takes the longest of its arithmetic at the peak, its traffic and "
        "its launch; one runs after another; messages beside which something runs are "
        "free"
    )
    for each in found:
        if unknown := each.get("unknown_loops"):
            what = f"{unknown} loops of unknown length, once each"
            lines.append(f"- {each['target']}: {what}")
        if moved := each.get("host_transfers"):
            names = ", ".join(moved[:LARGEST])
            lines.append(f"- {each['target']}: transfers with the host, free: {names}")
    return "\n".join(lines)


def _table(title, measured, rows) -> str:
    """A table with a column for each number of devices; rows are (name, cells)."""
    return _ruled([title, *(f"{program['devices']:,}" for program in measured)], rows)


def _ruled(head, rows) -> str:
    """A table; rows are (name, cells)."""
    lines = [head, *([name, *cells] for name, cells in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    ruled = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join(_row(line, widths) for line in [head, ruled, *lines[1:]])


def _row(cells, widths) -> str:
    first, *others = zip(cells, widths, strict=True)
    shown = [first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in others)]
    return "| " + " | ".join(shown) + " |"


def number(value) -> str:
    """About three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _millions(values) -> list[str]:
    return [number(value / 1e6) for value in values]


def _program(measured):
    """Rows (name, cells) with the numbers of the programs."""
    share = [program["batch_size"] / program["devices"] for program in measured]
    yield "examples of a device", [number(x) for x in share]
    yield "GFLOP of a device", [number(x["flops"] / 1e9) for x in measured]
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
        lines.append(f"- {number(size / 1e6)} MB, {kind}: `{name}`")
    return "\n".join(lines)


def _times(measured, estimated, machine):
    """Rows (name, cells) with the estimates for a machine."""
    yield "arithmetic, ms", [number(1e3 * x.compute) for x in estimated]
    yield "communication waited for, ms", [number(1e3 * x.waited) for x in estimated]
    yield "communication beside, ms", [number(1e3 * x.beside) for x in estimated]
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
    percent = [number(100 * x / machine.memory) for x in held]
    yield "memory without temporaries, %", percent


def _span(low, high) -> str:
    """Both numbers, or one if they read the same."""
    low, high = number(low), number(high)
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
