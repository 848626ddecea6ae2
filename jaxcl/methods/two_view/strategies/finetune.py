"""Fine-tuning: every task trains with the base's loss alone."""

from jaxcl.methods.two_view import records


def make() -> records.Strategy:
    """Train by the base's loss in every task."""
    return records.Strategy()
