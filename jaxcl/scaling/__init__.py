"""How a step would run on chips that are not there."""
