"""Random changes of images and of graphs, on the device."""
