"""The training loop, and the parts that feed, evaluate, save and record a run."""
