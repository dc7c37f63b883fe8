"""Predictions for a run before it starts: memory, step time, cost, failures."""
