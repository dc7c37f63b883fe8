"""What a run writes down and shows: metrics, events, provenance, the console."""
