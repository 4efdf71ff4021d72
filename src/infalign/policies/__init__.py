"""Responses of a policy with their rewards, and what they say of it."""
