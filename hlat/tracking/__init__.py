"""Experiment tracking: metrics.jsonl, events.jsonl, W&B, TensorBoard, provenance, the console."""
