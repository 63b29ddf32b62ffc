"""python -m app plot: curves of runs."""
