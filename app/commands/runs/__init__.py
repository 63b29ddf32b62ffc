"""python -m app runs: the list of runs."""
