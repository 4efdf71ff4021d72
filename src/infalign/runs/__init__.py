"""A run directory: what is in it, what is left to do, and doing it."""
