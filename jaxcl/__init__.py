"""Contrastive and continual representation learning in JAX and Flax."""
