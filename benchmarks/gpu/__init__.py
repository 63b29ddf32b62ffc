"""What one GPU shows, in parts of a few minutes: `python -m benchmarks.gpu`."""
