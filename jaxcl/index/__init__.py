"""Bring an index of stored vectors from one encoder to the next."""
