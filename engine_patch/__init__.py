"""What runs inside an engine: a vLLM plugin that writes down every engine step.

The plugin is opt-in: set `BALANCEROUTE_STEP_TRACE` to a folder in the engine's environment. It adds
hooks to the engine's own objects and edits none of its files. `balanceroute validate` compares what
it wrote with what the proxy believed.

    plugin.py     the entry point, `register`
    hooks.py      what is wrapped, and the guards around it
    identity.py   the header of a trace: whose steps these are
    records.py    the file format
    writer.py     the file, behind a thread
    reader.py     reads traces into numpy arrays (the only file here that is not for engines)

Rules of everything but the reader: standard library alone, and nothing here may break an engine.
What a hook needs is checked first; whatever still fails turns the trace off for good, with one
warning, and the engine's own call goes through exactly once.
"""
