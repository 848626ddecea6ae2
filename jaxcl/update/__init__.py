"""A run's encoder, taught new images and judged before it is accepted."""
