"""What online continual methods share: a network with one head, a memory, a step."""

from jaxcl.methods.online.network import Head, Network, Outputs, Rows
from jaxcl.methods.online.step import (
    Form,
    cross_entropy,
    descend,
    draw,
    images_of,
    log_weights,
    memory_of,
    method,
    move,
    network,
    past_tasks,
    taken,
)

__all__ = [
    "Form",
    "Head",
    "Network",
    "Outputs",
    "Rows",
    "cross_entropy",
    "descend",
    "draw",
    "images_of",
    "log_weights",
    "memory_of",
    "method",
    "move",
    "network",
    "past_tasks",
    "taken",
]
