"""Fault tolerance of a run: checks, checkpoints, rollback, restarts, and the time they take."""
