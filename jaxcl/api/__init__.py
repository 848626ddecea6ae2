"""The two ways in: `jaxcl.fit` for programs, the command `jaxcl` for terminals."""
