"""Memories: pytrees of fixed capacity with pure policies."""
