"""Typed configuration: one schema per config group, composition and validation.

This package is the bottom layer. It imports the standard library, omegaconf and, in `entry_point`
and `compose`, hydra.
"""
