"""The report of a run: figures and one page that anybody can open, made from the run folder alone.

It reads only what the run wrote down, so a report can be made again at any time, of a finished run,
of one that was killed, and of one that still goes on. Nothing is imported here: a plan is told in
words, without waiting for a library that draws.
"""
