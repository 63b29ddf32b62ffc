"""Networks for graphs, and what they sum."""
