"""Trainer back ends: the training loops that run on-policy solvers."""
