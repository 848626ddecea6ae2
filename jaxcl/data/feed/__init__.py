"""Batches on the host, read ahead of the steps that take them."""
