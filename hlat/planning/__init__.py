"""What a run needs and what to expect of it, before it is started: memory, the SDK, failures."""
