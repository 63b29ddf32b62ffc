"""Tests and benchmarks on one GPU, in parts of a few minutes: `python -m benchmarks.gpu`."""
