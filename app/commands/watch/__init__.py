"""python -m app watch: follow a run while it trains."""
