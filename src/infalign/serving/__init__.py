"""Answers of a policy, served by an inference-time procedure."""
