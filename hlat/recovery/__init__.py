"""What keeps a run alive, what ends it, and what that cost."""
