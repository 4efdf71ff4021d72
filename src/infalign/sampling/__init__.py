"""Responses drawn from a policy, and stored."""
