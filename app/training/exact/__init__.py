"""Exact mode: gradients, sums and scores with the same bits on every layout."""
