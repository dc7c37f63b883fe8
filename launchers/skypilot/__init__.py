"""Launcher of SkyPilot managed jobs."""
