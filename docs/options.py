"""Tables of options, made from the signatures when the site is built.

A line `<!-- options: MODULE.FUNCTION -->` in a page becomes a table of the function's
keyword-only options: name, default, and the meaning that `jaxcl options` prints.
`except NAME` in that line leaves an option out. A line
`<!-- headings ###: MODULE.{}.FUNCTION: a b -->` stands for a heading and such a line
for each of the names, `bold` in place of `###` for names in bold. A line
`<!-- list: KIND -->` becomes the table of `jaxcl list KIND`. mkdocs calls
`on_page_markdown`.

  python docs/options.py docs/options_run.md   # prints a page with its tables
"""

import importlib
import inspect
import pathlib
import re
import sys

from jaxcl.api.list import describe_kind
from jaxcl.api.options import meanings

MARKER = re.compile(r"^<!-- options: ([\w.]+)(?: except ([\w ]+))? -->$", re.M)
HEADINGS = re.compile(r"^<!-- headings (#+|bold): ([\w.{}]+): ([\w\s]+?)\s+-->$", re.M)
LISTED = re.compile(r"^<!-- list: (\w+) -->$", re.M)


def options(function, without=()) -> dict:
    """Return option -> default of a function's keyword-only arguments."""
    return {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.name not in without
    }


def table(path: str, without=()) -> str:
    """Return the table of the options of the function at a dotted path."""
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    told, lines = meanings(function), []
    for option, default in options(function, without).items():
        needed = default is inspect.Parameter.empty
        shown = "required" if needed else f"`{default!r}`"
        meaning = told.get(option, "").replace("|", r"\|")
        lines.append(f"| `{option}` | {shown} | {meaning} |")
    if not lines:
        return "No options."
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *lines])


def list_kind(kind: str) -> str:
    """Return the table of a kind of `jaxcl list`."""
    found = describe_kind(kind).items()
    escaped = {name: words.replace("|", r"\|") for name, words in found}
    rows = [f"| `{name}` | {words} |" for name, words in escaped.items()]
    return "\n".join(["| name | description |", "|---|---|", *rows])


def write_headings(text: str) -> str:
    """Return a page with a heading and a marker for each name of a `headings` line."""

    def sections(match):
        level, path, names = match.groups()
        lines = []
        for name in names.split():
            lines.append(f"**{name}**" if level == "bold" else f"{level} {name}")
            lines.append(f"<!-- options: {path.format(name)} -->")
        return "\n\n".join(lines)

    return HEADINGS.sub(sections, text)


def expand(text: str) -> str:
    """Return a page with a table in place of each marker."""
    text = write_headings(text)
    text = MARKER.sub(lambda m: table(m[1], (m[2] or "").split()), text)
    return LISTED.sub(lambda m: list_kind(m[1]), text)


def on_page_markdown(markdown, **_):
    """Expand the markers of a page; mkdocs calls this."""
    return expand(markdown)


if __name__ == "__main__":
    for page in sys.argv[1:]:
        print(expand(pathlib.Path(page).read_text()))
