"""Several data sets that are trained on together, by weights: how a file says it, and how their rows are joined."""
