"""Every knob: one folder per config group, and whole runs."""
