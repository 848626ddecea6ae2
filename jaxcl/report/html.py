"""HTML of a page that loads no other file: elements, numbers, style, script.

`element` escapes text, so that nothing that was read from a file becomes markup. The
page forbids the browser to load anything, or to run any script but the one below.
"""

import base64
import hashlib
import html
from collections.abc import Callable
from typing import Any

_VOID = ("img", "meta", "link")
MINUS = "\u2212"

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d1f21; --muted: #5a616b;
  --line: #d8dbe0; --wash: #f4f5f7; --accent: #0b5cad; --on-middle: var(--ink);
  --c0: #0b5cad; --c1: #c8500a; --c2: #00805c; --c3: #b04a86; --c4: #96700a;
  --c5: #2f9bd0; --c6: #3d4248; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #15171a;
  --ink: #e3e5e8; --muted: #9ca4ae; --line: #343940; --wash: #1d2024;
  --accent: #7db4ee; --on-middle: var(--paper); --c0: #7db4ee; --c1: #ee8a4e;
  --c2: #3cc296; --c3: #e094c0; --c4: #dcb24a; --c5: #a9dcf8; --c6: #d0d4d9; } }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
.c6 { --c: var(--c6); }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; padding: 20px 16px 48px; max-width: 1180px; color: var(--ink);
  background: var(--paper); font: 14px/1.45 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; font-weight: 600; }
h1 { font-size: 21px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 32px 0 8px; padding-top: 8px;
  border-top: 2px solid var(--accent); }
h3 { font-size: 14px; margin: 20px 0 6px; }
p { margin: 0 0 8px; max-width: 78ch; }
.muted, figcaption, caption, .i, .d { color: var(--muted); }
a { color: var(--accent); }
nav a { margin-right: 14px; }
.scroll { overflow-x: auto; margin: 0 0 12px; }
table { border-collapse: collapse; overflow-wrap: normal; }
caption { text-align: left; padding: 0 0 4px; }
th, td { padding: 4px 11px 4px 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 18ch; max-width: 44ch;
  overflow-wrap: anywhere; }
th { font-weight: 600; }
thead th { border-bottom-color: var(--muted); vertical-align: bottom; }
thead small { display: block; max-width: 20ch; margin-left: auto; font-weight: 400;
  color: var(--muted); white-space: normal; }
@media (min-width: 700px) { .scroll th:first-child { position: sticky; left: 0;
  background: var(--paper); } }
.i, .d { display: block; font-size: 12px; }
.swatch { width: 22px; height: 10px; margin-right: 6px; overflow: visible; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px;
  padding: 0; margin: 0 0 8px; }
.grid { display: grid; gap: 14px 24px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); }
.grid.wide { grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
.heats { display: flex; flex-wrap: wrap; gap: 8px 32px; margin-top: 10px; }
.heats figure { max-width: 100%; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { margin-bottom: 2px; }
figcaption b { color: var(--ink); font-weight: 600; }
.chart { display: block; width: 100%; height: auto; max-width: 620px;
  font-size: 11px; }
.chart text { fill: var(--muted); }
.chart .grid-line { stroke: var(--line); stroke-width: 1; }
.chart .task { fill: var(--wash); }
.chart .rule { stroke: var(--muted); stroke-width: 1; visibility: hidden; }
.chart .b { fill: var(--c); opacity: 0.13; stroke: none; }
.l, .e { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-linejoin: round; }
.e { stroke-width: 1; }
.m { fill: var(--paper); stroke: var(--c); stroke-width: 1.4; }
.readout { font-size: 12px; color: var(--muted); min-height: 18px; margin: 0; }
.heat th, .heat td { padding: 3px 5px; text-align: right; min-width: 38px;
  border: 1px solid var(--paper); font-size: 12px; }
.heat th { font-weight: 400; color: var(--muted); text-align: right; }
.heat tbody th { min-width: 0; }
.cell { background: color-mix(in srgb, var(--accent) var(--p), var(--paper)); }
.cell.on-middle { color: var(--on-middle); }
.cell.on-full { color: var(--paper); }
.none { color: var(--muted); outline: 1px dashed var(--line); outline-offset: -3px; }
.heat .none, .key .none { text-align: center; }
.key .cell, .key .none { display: inline-block; padding: 1px 8px; font-size: 12px; }
.picture { image-rendering: pixelated; border: 1px solid var(--line); display: block;
  width: min(100%, 340px); height: auto; }
.choose { display: inline-block; margin: 0 0 8px; color: var(--muted); }
select { font: inherit; color: inherit; background: var(--paper);
  border: 1px solid var(--line); padding: 2px 6px; max-width: 60vw; }
details { margin: 0 0 8px; }
summary { cursor: pointer; color: var(--accent); }
pre { overflow-x: auto; background: var(--wash); padding: 8px 10px; font-size: 12px;
  line-height: 1.35; margin: 6px 0; }
code { font: 12px ui-monospace, monospace; }
.sr { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; }
@media print { body { max-width: none; padding: 0; font-size: 11px; }
  .choose, .readout, nav { display: none; } .scroll { overflow: visible; }
  tr, figure { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .grid.wide { grid-template-columns: 1fr 1fr; }
  .grid { grid-template-columns: 1fr 1fr 1fr; }
  .cell, .chart .task { print-color-adjust: exact; } }
""".strip()

SCRIPT = """
"use strict";
for (const box of document.querySelectorAll("[data-choose]")) {
  const parts = [...box.children].filter((part) => part.dataset.name !== undefined);
  if (parts.length < 2) continue;
  const label = document.createElement("label");
  const select = document.createElement("select");
  label.className = "choose";
  label.append(box.dataset.choose + " ", select);
  select.append(new Option("all", ""));
  parts.forEach((part, i) => select.append(new Option(part.dataset.name, String(i))));
  select.addEventListener("change", () => parts.forEach((part, i) => {
    part.hidden = select.value !== "" && select.value !== String(i);
  }));
  box.before(label);
}
const axis = (text) => {
  const [from, to, low, high, log] = text.split(" ").map(Number);
  const ends = log ? [Math.log(low), Math.log(high)] : [low, high];
  return (at) => {
    const value = ends[0] + (at - from) / (to - from) * (ends[1] - ends[0]);
    return log ? Math.exp(value) : value;
  };
};
const short = (value) => Number(value.toPrecision(4)).toLocaleString("en", {
  maximumSignificantDigits: 4 });
for (const svg of document.querySelectorAll("svg[data-x]")) {
  const x = axis(svg.dataset.x), y = axis(svg.dataset.y);
  const curves = [...svg.querySelectorAll("path.l")].map((path) => ({
    name: path.dataset.name,
    points: path.getAttribute("d").match(/[-.0-9]+ [-.0-9]+/g).map((pair) =>
      pair.split(" ").map(Number)),
  }));
  const rule = svg.querySelector(".rule"), readout = document.createElement("p");
  readout.className = "readout";
  readout.setAttribute("aria-hidden", "true");
  svg.after(readout);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const near = (points) => points.reduce((best, point) =>
      Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
    const all = curves.map((curve) => ({ name: curve.name, at: near(curve.points) }));
    const middle = near(all.map((each) => each.at))[0];
    const found = all.filter((each) => Math.abs(each.at[0] - middle) < 4);
    rule.setAttribute("x1", middle);
    rule.setAttribute("x2", middle);
    rule.style.visibility = "visible";
    readout.textContent = "step " + Math.round(x(middle)).toLocaleString("en") + ": " +
      found.map((each) => each.name + " " + short(y(each.at[1]))).join(", ");
  });
  svg.addEventListener("pointerleave", () => {
    rule.style.visibility = "hidden";
    readout.textContent = "";
  });
}
""".strip()


class Html(str):
    """Markup; a string of any other kind is text."""


def _escaped(value) -> str:
    # Names of files, and JSON, may hold halves of surrogate pairs.
    return html.escape(str(value).encode("utf-8", "replace").decode())


def _flat(children):
    for child in children:
        if isinstance(child, list | tuple):
            yield from _flat(child)
        elif child is not None:
            yield child if isinstance(child, Html) else _escaped(child)


def element(name: str, /, *children, **attributes) -> Html:
    """An element; children that are not `Html` are escaped, as attributes are.

    Args:
      children: text, `Html`, lists of these; None is left out.
      attributes: `class_` is class, `data_x` is data-x; None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{''.join(_flat(children))}</{name}>")


def join(*children) -> Html:
    """Children one after another, without an element around them."""
    return Html("".join(_flat(children)))


def section(key: str, title: str, *children) -> Html:
    """A section of the page with a title, and `key` for links to it."""
    return element("section", element("h2", title), children, id=key)


def note(*children) -> Html:
    """A paragraph in a muted colour."""
    return element("p", children, class_="muted")


def document(title: str, body: Html) -> str:
    """The whole page."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(STYLE)),
    )
    body = element("body", body, element("script", Html(SCRIPT)))
    return f'<!doctype html>\n<html lang="en">{head}\n{body}</html>\n'


# Numbers


def _signed(text: str, *, plus=False) -> str:
    text = text.replace("-", MINUS)
    return f"+{text}" if plus and not text.startswith(MINUS) else text


def percent(value: float | None, *, plus: bool = False) -> str:
    """A share in percent, one decimal; "-" for None or nan."""
    if value is None or value != value:
        return "-"
    return _signed(f"{100 * value:.1f}", plus=plus)


def number(value: float | None, *, plus: bool = False) -> str:
    """Any number in four digits; "-" for None or nan."""
    if value is None or value != value:
        return "-"
    large = 10_000 <= abs(value) < 1e12
    if large or (value == round(value) and abs(value) < 1e12):
        text = f"{value:,.0f}"
    else:
        text = f"{value:#.4g}"  # zeros at the end say how exact it is
    return _signed(text.rstrip("."), plus=plus)


def short(value: float | None) -> str:
    """A count in three digits, with a prefix; "-" for None."""
    if value is None:
        return "-"
    power = min(int(f"{value:.2e}".partition("e")[2]) // 3, 6) if value else 0
    prefix = ["", " k", " M", " G", " T", " P", " E"][max(power, 0)]
    return f"{value / 1000 ** max(power, 0):.3g}{prefix}"


def seconds(value: float | None) -> str:
    """Seconds, with a decimal below 100; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def estimate(
    value: Any, form: Callable[..., str], *, expected: int, delta: Any = None
) -> list:
    """The content of a cell with a mean over seeds and its interval.

    Args:
      value: `numbers.Estimate`.
      form: `percent` or `number`.
      expected: seeds of the row; if the mean is over fewer, the cell says how many.
      delta: `numbers.Estimate` of the difference to the first run; None: not shown.
    """
    shown = [element("span", form(value.mean), class_="v")]
    if value.mean is not None:
        shown.append(element("span", _interval(value, form, expected), class_="i"))
    if delta is not None:
        told = "Δ -"
        if delta.mean is not None:
            told = f"Δ {form(delta.mean, plus=True)} "
            told += _interval(delta, form, expected, plus=True)
        shown.append(element("span", told, class_="d"))
    return shown


def _interval(value, form, expected, **options) -> str:
    ends = "-"
    if value.low is not None:
        ends = f"[{form(value.low, **options)}, {form(value.high, **options)}]"
    count = "" if value.seeds == expected else f" n = {value.seeds}"
    return ends + count


def table(head: list, rows: list, *, label: str, caption: str | None = None) -> Html:
    """A table, with a scroll bar of its own if it is wide.

    Args:
      head: of the columns; texts, or what `column` gives.
      rows: lists of cells; the first is the row's header, others `Html` of a td.
      label: for screen readers.
      caption: above the table.
    """
    return element(
        "div",
        element(
            "table",
            None if caption is None else element("caption", caption),
            element("thead", element("tr", [_head(title) for title in head])),
            element(
                "tbody",
                [
                    element("tr", element("th", row[0], scope="row"), row[1:])
                    for row in rows
                ],
            ),
        ),
        class_="scroll",
        role="region",
        tabindex="0",
        aria_label=label,
    )


def _head(title) -> Html:
    is_column = isinstance(title, Html) and title.startswith("<th ")
    return title if is_column else column(title)


def column(head: Any, *, text: bool = False) -> Html:
    """A th above a column; `text`: the column holds text, not numbers."""
    return element("th", head, scope="col", class_="text" if text else None)


def cell(value: Any, *, text: bool = False) -> Html:
    """A td; `text`: it holds text, not a number."""
    return element("td", value, class_="text" if text else None)
