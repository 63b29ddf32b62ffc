"""What changes weights: learning rates, groups of parameters, optimizers and averages."""
