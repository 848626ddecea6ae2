"""The two entry points: `jaxcl.fit` for programs, the command `jaxcl` for terminals."""
