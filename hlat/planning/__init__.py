"""What a run needs, before it is started: memory, and what the pinned SDK accepts."""
