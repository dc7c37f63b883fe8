"""Figures and parts of pages for plans, reports, campaigns and the chat page.

This module imports nothing, so that text output of a plan does not import matplotlib.
"""
