"""What every process of the proxy does at its start."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource
from balanceroute.proxy.live.process_edge import settle_memory

settle_memory()
for number in range(23):
    bodies = [b"x" * (1 << 20) for _ in range(4)]
    del bodies
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not GNU's C library")
def test_what_large_bodies_leave_behind_is_used_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    # Of 20,480 pages of 4 KiB.
    assert int(done.stdout) < 2_000
