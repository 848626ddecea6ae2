"""Reading a page of Markdown: its code, its prose, its commands, its tables."""

import re
import shlex

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def blocks(text, language):
    return [body for kind, body in FENCE.findall(text) if kind == language]


def prose(text):
    """The text without its fenced blocks."""
    return FENCE.sub("", text)


def commands(text, module):
    """Arguments of every `python -m MODULE ...` line, one list each.

    A module "jaxcl WORD" stands for the command of that name.
    """
    joined = re.sub(r"\\\n\s*", " ", text)
    start = module if " " in module else f"python -m {module}"
    matches = re.findall(rf"{re.escape(start)}\b([^\n`]*)", joined)
    return [list(map(filled, shlex.split(arguments))) for arguments in matches]


def filled(argument):
    """An argument with something for each word that stands for a choice."""
    rows = {"er_ace": "mir", "cclis": "co2l", "duel": "simclr", "icl": "retrain"}
    family = re.search(r"configs/(er_ace|cclis|duel|icl)_", argument)
    row = rows[family[1]] if family else "row"
    words = {"SEED": "5", "STRATEGY": "pnr", "BASE": "simclr", "ROW": row}
    for word, value in words.items():
        argument = re.sub(rf"(?<![A-Z]){word}(?![A-Z])", value, argument)
    return argument


def cells(row):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
