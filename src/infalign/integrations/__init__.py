"""The calibrated and transformed reward inside other trainers, one file a framework, each imported alone."""
