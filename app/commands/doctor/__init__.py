"""python -m app doctor: what this machine has."""
