"""Engine of the paper: neuronx-distributed on PyTorch/XLA, for trn1."""
