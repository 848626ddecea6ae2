"""Evaluators, found by name: modules with `make(parts, *, ...)`."""
