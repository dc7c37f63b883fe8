"""Launcher of processes on this machine."""
