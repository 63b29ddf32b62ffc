"""Detectors of objects: a dense one from scratch, those of the DETR family, their losses, and pictures of boxes."""
