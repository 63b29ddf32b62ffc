"""One training step: loading, gradients, the optimizer, losses and scores."""
