"""Several methods trained in one run directory, on the same rollouts, and compared at the same KL."""
