"""Studies over several trainings."""
