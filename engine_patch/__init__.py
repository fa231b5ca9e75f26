"""Runs inside an engine: a vLLM plugin that records every engine step.

The plugin is opt-in: set `BALANCEROUTE_STEP_TRACE` to a folder in the engine's environment. It adds
hooks to the engine's own objects and edits none of its files. `balanceroute validate` compares the
records with the proxy's estimates.

    plugin.py     the entry point, `register`
    hooks.py      the wrapped methods, and the guards around them
    identity.py   the header of a trace: the engine and its rank
    records.py    the file format
    writer.py     the file, behind a thread
    reader.py     reads traces into numpy arrays (the only file here that is not for engines)

Rules of everything but the reader: standard library alone, and nothing here may break an engine.
The hooks first check that the engine has all that they need. Any later failure turns the trace off
permanently, with one warning, and the engine's own call is made exactly once.
"""
