"""What online continual methods share: a network with one head, a memory, a step."""

from jaxcl.methods.online.network import Head, Network, Outputs, Rows
from jaxcl.methods.online.step import (
    Form,
    ReplayFrom,
    cross_entropy,
    descend,
    draw,
    images_of,
    method,
    move,
    network,
    past_tasks,
    replayable,
    stored_rows,
    taken,
    together,
)

__all__ = [
    "Form",
    "Head",
    "Network",
    "Outputs",
    "ReplayFrom",
    "Rows",
    "cross_entropy",
    "descend",
    "draw",
    "images_of",
    "method",
    "move",
    "network",
    "past_tasks",
    "replayable",
    "stored_rows",
    "taken",
    "together",
]
