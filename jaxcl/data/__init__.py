"""Sources of examples, their order, and their way to the device."""
