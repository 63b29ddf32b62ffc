"""python -m app torture: kill a run again and again."""
