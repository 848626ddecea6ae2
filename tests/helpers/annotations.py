"""Annotations of options, read: their numbers and choices, and values they allow."""

import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from jaxcl import schema

INF = float("inf")


class Leaf(NamedTuple):
    """A number or a choice somewhere in what an annotation says."""

    kind: Any  # float, int, or a Literal
    rules: tuple
    beside: tuple  # it, and the other members of its union
    wrap: Any  # puts a value in its place; the other entries are allowed ones


def members(annotation):
    """The members of a union, or the annotation alone."""
    if typing.get_origin(annotation) is Annotated or not isinstance(
        annotation, typing._UnionGenericAlias | type(int | None)
    ):
        return (annotation,)
    return typing.get_args(annotation)


def bare(annotation):
    """An annotation without its rules, and these."""
    if typing.get_origin(annotation) is Annotated:
        kind, *rules = typing.get_args(annotation)
        return kind, tuple(rules)
    return annotation, ()


def allowed(annotation):
    """A value that an annotation allows."""
    kind, rules = bare(members(annotation)[0])
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)[0]
    for rule in rules:
        if isinstance(rule, schema.Range):
            low = rule.least if rule.least > -INF else 1
            if rule.above > -INF:
                low = rule.above + min(1e-3, (rule.most - rule.above) / 2)
            return int(low) if kind is int else low
    return {int: 1, float: 0.5, str: "a", dict: {}}.get(kind, "a")


def leaves(annotation):
    """Every number and every choice of an annotation."""
    for member in members(annotation):
        kind, rules = bare(member)
        origin = typing.get_origin(kind)
        if kind in (int, float) or origin is Literal:
            beside = tuple(bare(x)[0] for x in members(annotation))
            yield Leaf(kind, rules, beside, lambda value: value)
        elif origin in (tuple, list, Sequence):
            entries = typing.get_args(kind)
            if entries[-1] is Ellipsis or len(entries) == 1:
                entries = entries[:1]
            for place, entry in enumerate(entries):
                for leaf in leaves(entry):

                    def wrap(value, place=place, inner=leaf.wrap, entries=entries):
                        filled = [allowed(x) for x in entries]
                        filled[place] = inner(value)
                        return tuple(filled)

                    yield leaf._replace(wrap=wrap)


def others(annotation, default) -> Iterator:
    """Values other than the default that an annotation allows, small ones first."""
    for value in _candidates(annotation, default):
        try:
            schema.check_value(value, annotation, "option")
        except ValueError:
            continue
        if value != default or type(value) is not type(default):
            yield value


def _candidates(annotation, default) -> Iterator:
    """Values that may be allowed."""
    for member in members(annotation):
        kind, _ = bare(member)
        origin = typing.get_origin(kind)
        if kind is bool:
            yield from (True, False)
        elif origin is Literal:
            yield from typing.get_args(kind)
        elif kind in (int, float):
            plain = default if type(default) in (int, float) else allowed(member)
            if kind is int:
                yield from (plain + 1, plain - 1, 8, 3, 2, 2 * plain)
            else:
                yield from (plain / 2, plain * 1.5, plain + 0.25, 0.5, 2.0)
        elif origin in (tuple, list, Sequence) and isinstance(default, tuple | list):
            entries = typing.get_args(kind)
            yield from (default[:1], default[:-1])
            for place, value in enumerate(default):
                entry = entries[0 if entries[-1] is Ellipsis else place]
                for other in _candidates(entry, value):
                    yield (*default[:place], other, *default[place + 1 :])
        if kind is type(None):
            yield None
