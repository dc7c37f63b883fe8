"""Typed configuration: one file per config group, the root, the rules across groups.

This package is the bottom layer: it imports the standard library, omegaconf and, in `entry` and
`compose`, hydra.
"""
