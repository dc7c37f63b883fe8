"""Reports: one HTML page per run or comparison, made from the files of the run directories.

A report can be made at any time, of a finished, killed or running run.
"""
