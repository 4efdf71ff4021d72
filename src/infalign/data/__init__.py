"""Preferences, demonstrations and prompts: read into one form and split without leaks."""
