"""Inference: load a model, generate text, and serve it over HTTP."""
