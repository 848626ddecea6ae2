"""Evaluators, found by name; each has `make(parts, method, stream, *, ...)`."""
