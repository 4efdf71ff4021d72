"""Faults injected into real runs: what the user sees of each, and that nothing is lost (``make test-faults``)."""
