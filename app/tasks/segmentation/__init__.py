"""What segmentation needs apart from a model: losses, scores, sliding windows over whole images, and pictures."""
