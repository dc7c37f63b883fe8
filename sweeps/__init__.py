"""One YAML per study."""
