"""Unbiased win rates and KL from samples, with intervals."""
