"""python -m app launch: train a recipe under a profile."""
