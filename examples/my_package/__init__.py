"""A package of your own that extends jaxcl: one small module for each extension."""
