"""Arithmetic of precision recipes: memory, torch dtypes, stochastic rounding and its random bits.

To add a precision recipe, write conf/precision/NAME.yaml; hlat/config/precision.py is its schema,
and `validate_precision` in hlat/config/config_validation.py rejects combinations.
"""
