"""python -m app completion: commands and options, completed by a shell."""
