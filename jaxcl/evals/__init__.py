"""Evaluators, found by name; each module has `make(parts, *, ...)`, see
core.EvalParts."""
