"""Studies that compare several trainings."""
