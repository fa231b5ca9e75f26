"""The emulated engines as a process of their own, and the line that it prints when it is ready."""

import json
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from balanceroute.proxy.core.errors import BalanceRouteError, shown

_READY_S = 30.0
_END_S = 10.0
_READY_BYTES = 1 << 20


class EngineProcessError(BalanceRouteError):
    """The emulated engines did not start, or ended too early."""


@contextmanager
def emulated_engines(command: Sequence[str]) -> Iterator[dict[str, object]]:
    """Run the engines; yield their addresses as `serve`'s flags.

    Raises:
        EngineProcessError: They did not start.
    """
    with engine_process(command) as process:
        yield addresses(ready_line(process))


@contextmanager
def engine_process(command: Sequence[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Run the engines until the context ends.

    The engines end when their standard input does, so that they never outlive this process, however
    it ends. A session of their own keeps the terminal's Ctrl-C from ending them before the proxy.
    """
    process = subprocess.Popen(  # noqa: S603 - this package's own command.
        command,
        # Unbuffered, so that a read takes no more than the bytes that have arrived.
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def ready_line(process: "subprocess.Popen[bytes]") -> bytes:
    """Return the first line that the engines print.

    Raises:
        EngineProcessError: They end first, or print none in time.
    """
    assert process.stdout is not None
    line = bytearray()
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], _READY_S)[0]:
            raise EngineProcessError(f"the emulated engines were not ready after {_READY_S:g} s")
        piece = process.stdout.read(_READY_BYTES)
        line += piece
        if not piece:
            process.kill()
            status = process.wait()
            reason = f"ended with status {status} before they were ready"
            raise EngineProcessError(f"the emulated engines {reason}")
        if len(line) > _READY_BYTES:
            raise EngineProcessError(f"the emulated engines said {shown(bytes(line))}")
    return bytes(line)


def addresses(line: bytes) -> dict[str, object]:
    """Return the flags in the line that the engines print when they are ready.

    Raises:
        EngineProcessError: It is another line.
    """
    try:
        ready = json.loads(line)
    except ValueError:
        ready = None
    found: dict[str, object] = {}
    if isinstance(ready, Mapping) and ready.get("ready") is True:
        for name in ("prefill", "decode", "bootstrap"):
            urls = ready.get(name)
            if isinstance(urls, list) and urls and all(isinstance(url, str) for url in urls):
                found[name] = urls
    if not found.keys() >= {"prefill", "decode"}:
        raise EngineProcessError(f"the emulated engines said {shown(line)} instead of ready")
    return found
