"""Encoders that others have trained, as folders that `jaxcl.load_encoder` reads."""
