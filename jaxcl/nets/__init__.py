"""Encoders and heads: flax.linen modules, parameters are plain trees."""
