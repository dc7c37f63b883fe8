"""Precision: memory of recipes, torch dtypes, stochastic rounding and its random bits."""
