"""python -m app prove: the same recipe under several profiles, compared."""
