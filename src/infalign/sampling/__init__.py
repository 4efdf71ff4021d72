"""Responses drawn from a policy, and kept."""
