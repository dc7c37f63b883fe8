"""Jobs that schedulers run: what was sent, what an attempt does, what became of it."""
