"""Images with masks, in 2D and 3D."""
