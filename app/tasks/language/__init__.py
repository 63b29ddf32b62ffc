"""Language models: adapters, and text from a model in training."""
