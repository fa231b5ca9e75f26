"""Runs `balanceroute` with a thread that stands in its way: `python stalled.py serve ...`.

Ten times a second the thread holds Python's interpreter lock for 50 ms, as a long garbage collection
or a large computation does. It sleeps meanwhile, so that it takes no core from anybody: what a stream
then waits for is Python, not a processor.
"""

import ctypes
import runpy
import sys
import time
from threading import Thread

_HELD_S, _EVERY_S = 0.05, 0.1


def _stall() -> None:
    # Of a PyDLL, calls keep the lock.
    usleep = ctypes.PyDLL(None).usleep
    while True:
        time.sleep(_EVERY_S - _HELD_S)
        usleep(round(_HELD_S * 1e6))


if __name__ == "__main__":
    sys.path.pop(0)  # This folder's modules are none of the proxy's.
    Thread(target=_stall, daemon=True).start()
    runpy.run_module("balanceroute.proxy", run_name="__main__")
