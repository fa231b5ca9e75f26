"""What the proxy believed of its decode ranks, against what their engines did.

load_log.py   the proxy's samples
timeline.py   an engine's steps as a load over time
matching.py   which trace is which rank's
mirror.py     how far the proxy's loads were off, and how late
barrier.py    ranks in lock step, and what they lost waiting for each other
fit.py        the step time's line, T = a + b max L
validation.py all of it together
plots.py      pictures
"""
