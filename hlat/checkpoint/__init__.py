"""Layout-free store of a run's state: canonical names, global shapes, slices."""
