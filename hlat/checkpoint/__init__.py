"""Layout-independent checkpoints: canonical tensor names, global shapes and slices."""
