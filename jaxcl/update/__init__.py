"""Train a run's encoder on new images, and accept or reject the new encoder."""
