"""Checks of a run's arithmetic on its engine and layout, with a reduced model."""
