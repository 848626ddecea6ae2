"""Write the tables of options in docs/*.md from the signatures of their functions.

  python docs/options.py

A table stands below a line `<!-- options: MODULE.FUNCTION -->`; `except NAME` in that
line leaves an option out. Names, order and defaults come from the signature. Meanings
stay as they were written; a new option gets its line of the docstring's `Args`.
"""

import importlib
import inspect
import pathlib
import re

MARKER = re.compile(
    r"(<!-- options: ([\w.]+)(?: except (\w+))? -->\n\n\|.*\n\|.*\n)((?:\|.*\n)*)"
)


def options(function, without=None) -> dict:
    """Return option -> default of a function's keyword-only arguments."""
    return {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.name != without
    }


def meanings(function) -> dict:
    """Return option -> text of the docstring's `Args`, each on one line."""
    _, _, text = (inspect.getdoc(function) or "").partition("Args:\n")
    found = {}
    for names, told in re.findall(
        r"^  ([\w, ]+): (.*(?:\n {4,}.*)*)", text.partition("\n\n")[0], re.M
    ):
        line = " ".join(told.split()).rstrip(".").replace("|", r"\|")
        found |= dict.fromkeys(names.split(", "), line)
    return found


def _value(cell):
    """Return what a cell says, 4 / 3 and 2**30 too."""
    try:
        return eval(cell, {"__builtins__": {}})
    except (SyntaxError, NameError):
        return cell


def _table(match) -> str:
    head, path, without, rows = match.groups()
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    written = {}
    for row in rows.splitlines():
        option, default, *rest = re.split(r"(?<!\\)\|", row.strip("|"))
        written[option.strip(" `")] = default.strip(" `"), [x.strip() for x in rest]
    told, lines = meanings(function), []
    for option, default in options(function, without).items():
        shown = "required" if default is inspect.Parameter.empty else repr(default)
        old, rest = written.get(option, (None, [told.get(option, "")]))
        same = old is not None and _value(old) == default
        if same and type(_value(old)) is type(default):
            shown = old  # 1e-4 where repr says 0.0001
        shown = shown if shown == "required" else f"`{shown}`"
        lines.append("| " + " | ".join([f"`{option}`", shown, *rest]).rstrip() + " |\n")
    return head + "".join(lines)


def rewritten(text: str) -> str:
    """Return a page whose tables of options are those of the signatures."""
    return MARKER.sub(_table, text)


if __name__ == "__main__":
    for page in sorted(pathlib.Path(__file__).parent.glob("*.md")):
        before = page.read_text()
        if (after := rewritten(before)) != before:
            page.write_text(after)
            print(page.name)
