"""python -m app submit: hand a run to a scheduler."""
