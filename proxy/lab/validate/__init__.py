"""The proxy's estimate of its decode ranks' loads, compared with what their engines did.

load_log.py   the proxy's samples
timeline.py   an engine's steps as a load over time
matching.py   which trace is which rank's
mirror.py     how far the proxy's loads were off, and how late
barrier.py    ranks in lock step, and the time that they waited for each other
fit.py        the line of the step time, T = a + b max L
validation.py all of these together
plots.py      pictures
"""
