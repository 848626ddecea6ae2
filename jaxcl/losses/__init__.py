"""Loss functions of arrays, one per equation."""
