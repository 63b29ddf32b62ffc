"""Samestep: the same training step, whatever the hardware."""
