"""What keeps a run alive, and what ends it: signals, divergence rules; and what that cost."""
