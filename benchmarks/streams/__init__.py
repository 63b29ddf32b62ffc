"""Data that are read by chunks: how fast, from how many requests, and how well mixed, next to other ways to read."""
