"""Reports: figures and one HTML page per run, made from the files of its run directory.

A report can be made at any time, of a finished, killed or running run. This module imports nothing,
so that text output of a plan does not import matplotlib.
"""
