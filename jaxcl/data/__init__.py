"""Where examples come from, in which order, and how they reach the device."""
