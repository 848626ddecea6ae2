"""Numbers that others published, reproduced by one command each."""
