"""Write the pages as plain Markdown with their tables, before a site is built.

`python docs/options.py build/docs` copies docs/ there; any generator can read the copy,
and `mkdocs build` does. A line `<!-- options: MODULE.FUNCTION -->` becomes a table of
the function's keyword-only options: name, default, and the meaning that `jaxcl options`
prints. `except NAME` in that line leaves an option out. A line
`<!-- headings ###: MODULE.{}.FUNCTION: a b -->` stands for a heading and such a line
for each of the names, `bold` in place of `###` for names in bold. A line
`<!-- list: KIND -->` becomes the table of `jaxcl list KIND`. A line `--8<-- "FILE"`
becomes that file of the repository.
"""

import importlib
import inspect
import pathlib
import re
import shutil
import sys

from jaxcl.api.list import describe_kind
from jaxcl.api.options import meanings

MARKER = re.compile(r"^<!-- options: ([\w.]+)(?: except ([\w ]+))? -->$", re.M)
HEADINGS = re.compile(r"^<!-- headings (#+|bold): ([\w.{}]+): ([\w\s]+?)\s+-->$", re.M)
LISTED = re.compile(r"^<!-- list: (\w+) -->$", re.M)
INCLUDED = re.compile(r'^( *)--8<-- "([^"]+)"$', re.M)
ROOT = pathlib.Path(__file__).parents[1]
_LEFT_OUT = ("*.json", "*.py", "*.txt", "__pycache__")


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


def include_files(text: str) -> str:
    """Return a page with files in place of the lines that name them, as indented."""

    def read(match):
        lines = (ROOT / match[2]).read_text().rstrip("\n").split("\n")
        return "\n".join(f"{match[1]}{line}".rstrip() for line in lines)

    return INCLUDED.sub(read, text)


def write_pages(folder: pathlib.Path) -> None:
    """Copy docs/ to a folder, which is replaced, with all pages expanded."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for page in folder.rglob("*.md"):
        page.write_text(include_files(expand(page.read_text())))


if __name__ == "__main__":
    write_pages(pathlib.Path(sys.argv[1]))
