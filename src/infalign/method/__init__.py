"""Procedures, transformations, calibration and credit: the mathematics of the method on plain arrays."""
