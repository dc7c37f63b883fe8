"""HTTP server of a model."""
