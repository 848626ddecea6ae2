"""Evaluators, found by name; each has `make(parts, *, ...)`, see core.EvalParts."""
