"""python -m app plan: what a run will be, before it trains."""
