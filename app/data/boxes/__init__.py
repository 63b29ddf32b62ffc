"""Images with boxes around objects: their files, the checks of boxes, and samples to train a detector on."""
