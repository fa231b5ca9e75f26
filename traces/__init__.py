"""Request traces: readers for the public formats and a native one, and public traces.

This folder is a leaf: it imports nothing else of the project.
"""

from balanceroute.traces.formats import read_names, write_native
from balanceroute.traces.lines import TraceError, TraceRequest
from balanceroute.traces.mix import read_mix, with_sessions
from balanceroute.traces.reader import FORMATS, detect_format, read_trace, shipped_traces

__all__ = [
    "FORMATS",
    "TraceError",
    "TraceRequest",
    "detect_format",
    "read_mix",
    "read_names",
    "read_trace",
    "shipped_traces",
    "with_sessions",
    "write_native",
]
