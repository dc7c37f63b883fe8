"""Launcher of Kubernetes jobs."""
