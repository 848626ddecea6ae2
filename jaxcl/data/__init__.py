"""From files to batches in rooms: images, sources, stream and feed; and augment."""
