"""Campaigns: stages of training, averaging, evaluation and reporting that depend on each other."""
