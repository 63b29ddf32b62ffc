"""python -m app watch: a run that is going on."""
