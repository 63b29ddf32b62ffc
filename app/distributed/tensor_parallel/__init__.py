"""Tensor parallelism: layers whose weights are split over processes that see the same samples."""
