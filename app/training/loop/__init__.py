"""One step of training and what is due after it: gradients, losses, checks, evaluation, and the two ends of a run."""
