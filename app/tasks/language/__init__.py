"""Language models: attention, adapters, and text from a model in training."""
