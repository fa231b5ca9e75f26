"""What a fleet behind any router loses at the barrier, and what other policies would recover.

It only reads: the engines' metrics, and a log or trace of the same load if there is one.
"""
