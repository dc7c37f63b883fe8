"""Engine on PyTorch only."""
