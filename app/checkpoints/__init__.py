"""State to disk and back, readable on every layout."""
