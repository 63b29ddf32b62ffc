"""python -m app torture: a run that is killed again and again."""
