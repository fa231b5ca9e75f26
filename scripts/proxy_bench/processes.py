"""Processes under test: on which cores they run, what they cost, and how they end."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from socket import create_server
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Process = subprocess.Popen[Any]
_TICK_S = 0.01  # Of the kernel's CPU times.
_START_S = 30.0


@contextmanager
def on_cores(cores: list[int]) -> "Iterator[None]":
    """Run on some cores, as does what is started meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def ended(process: Process) -> "Iterator[Process]":
    """End a process when the block ends."""
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_it_answers(port: int, path: str, body: bytes) -> None:
    """Wait until a server answers a request with a status of 2xx."""
    deadline_s = time.monotonic() + _START_S
    while (status := _status(port, path, body)) // 100 != 2:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"port {port} answers {path} with status {status}")
        time.sleep(0.1)


def _status(port: int, path: str, body: bytes) -> int:
    """Return the status of an answer; 0 for none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children so far, in seconds."""
    ticks = 0
    for one in family(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def rss_mb(process: Process) -> float:
    """Return the resident memory of a process and its children, in MB."""
    return sum(_rss_mb(pid) for pid in family(process.pid))


def _rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def family(pid: int) -> list[int]:
    """Return a process and all that came of it."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return [pid, *(one for child in children for one in family(child))]
