"""Evaluation of models on benchmark tasks and held-out text."""
