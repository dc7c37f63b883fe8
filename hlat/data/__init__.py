"""The data room: Arrow files in, token batches out.

Its order is a function of the seed, the sources and the global batch size alone, so that a run
reads the same batches on any number of ranks, with any depth of prefetch, and after every resume.
"""
