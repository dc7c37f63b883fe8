"""Sweeper that searches hyperparameters with Optuna."""
