"""Launcher of Slurm jobs."""
