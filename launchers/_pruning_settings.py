"""Treatment of invalid points, a setting of all launchers."""

from dataclasses import dataclass


@dataclass
class PruningConfig:
    """Treatment of invalid points."""

    prune: bool = False
    """Skip and list invalid points instead of rejecting the whole sweep; with hardware known to the
    planner, run the other points in order of predicted speed, fastest first."""
