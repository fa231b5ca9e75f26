"""Discrete-event simulation of a prefill-decode deployment that drives the real scheduler."""
