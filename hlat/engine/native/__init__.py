"""The engine on PyTorch alone."""
