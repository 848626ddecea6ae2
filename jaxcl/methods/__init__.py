"""One module per method, found by name; each has `make(parts, *, ...)`."""
