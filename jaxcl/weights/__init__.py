"""Encoders of runs as folders, and those folders read back."""
