"""python -m app export: a model out of a run."""
