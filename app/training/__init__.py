"""One step: gradients, the optimizer, loading, and what is measured."""
