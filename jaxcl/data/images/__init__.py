"""Images in files: decode, crop, read them row by row."""
