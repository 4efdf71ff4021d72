"""What is known before a run: laws, optima and finite models."""
