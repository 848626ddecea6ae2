"""The training loop, and what a run feeds, judges, saves and writes."""
