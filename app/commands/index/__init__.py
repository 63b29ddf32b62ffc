"""python -m app index: the index of streamed data."""
