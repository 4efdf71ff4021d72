"""Rewards of responses by a classifier, a function or a server, checked and stored."""
