"""What is prepared, to files and back by names that are the same on every layout; whole or not at all."""
