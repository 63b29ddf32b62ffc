"""python -m app runs: what runs there are."""
