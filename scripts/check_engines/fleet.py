"""A proxy in front of real engines, as the checks see it."""

import json
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client import CLIENT
from engines import Engine

_READY = re.compile(r"listening on (http://\S+), admin on (http://\S+)\n")
# A start is half a second of one core; beside engines that compute it is many times that.
_READY_S = 120.0
# Requests that an engine has answered.
SUCCESSES = "vllm:request_success_total"
# KV caches that a NIXL prefiller handed out after their lease.
LATE_PULLS = "vllm:nixl_num_notifications_after_expiry_total"


@dataclass(frozen=True)
class Proxy:
    """A running proxy: its URL, its admin listener's, and its log."""

    url: str
    admin_url: str
    log: Path

    def state(self) -> dict[str, object]:
        """Return /admin/state."""
        state: dict[str, object] = CLIENT.get(f"{self.admin_url}/admin/state", timeout=10.0).json()
        return state

    def instances(self) -> list[dict[str, Any]]:
        """Return /admin/instances."""
        page = CLIENT.get(f"{self.admin_url}/admin/instances", timeout=10.0).json()
        rows: list[dict[str, Any]] = page["instances"]
        return rows

    def bound(self, engine: Engine) -> int:
        """Return how many requests there are on a decode engine."""
        state: Any = self.state()
        (rank,) = [rank for rank in state["state"]["ranks"] if rank["name"] == engine.url]
        return int(rank["bound"])

    def order(self, path: str, **order: object) -> None:
        """Give an administrator's order."""
        answer = CLIENT.post(f"{self.admin_url}{path}", json=order, timeout=10.0)
        assert answer.status_code == 200, answer.text

    def line_of(self, request_id: str) -> dict[str, Any]:
        """Return what the log says of a request that has ended."""
        deadline_s = time.monotonic() + 10.0
        while time.monotonic() < deadline_s:
            for text in self.log.read_text().splitlines():
                line: dict[str, Any] = json.loads(text)
                if line.get("request_id") == request_id:
                    return line
            time.sleep(0.1)
        raise AssertionError(f"no line of request {request_id} in the log")


@dataclass(frozen=True)
class Fleet:
    """What runs.

    Attributes:
        prefillers: The prefill engines.
        decoders: The decode engines.
        connector: As the proxy calls it.
        flags: What every proxy before it is told.
        folder: For logs.
        steps: Where the decode engines leave their step traces.
    """

    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    connector: str
    flags: Sequence[str]
    folder: Path
    steps: Path

    @contextmanager
    def proxy(
        self, name: str, *flags: str, prefill: Sequence[str] = (), decode: Sequence[str] = ()
    ) -> Iterator[Proxy]:
        """Run a proxy.

        Args:
            name: Of its log.
            flags: Further ones of `balanceroute serve`.
            prefill: The prefillers; none for all prefill engines.
            decode: The ranks; none for all decode engines.
        """
        log = self.folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "balanceroute.proxy", "serve", "--port=0"]
        command += ["--admin-port=0", f"--log={log}", f"--connector={self.connector}"]
        command += ["--prefill", *(prefill or [engine.url for engine in self.prefillers])]
        command += ["--decode", *(decode or [engine.url for engine in self.decoders])]
        command += ["--batch", "16", *self.flags, *flags]  # The last word counts.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
        assert process.stdout is not None
        try:
            readable = select.select([process.stdout], [], [], _READY_S)[0]
            ready = _READY.fullmatch(process.stdout.readline().decode()) if readable else None
            if ready is None:
                told = log.read_text()[-1000:] if log.exists() else "it has no log"
                raise SystemExit(f"the proxy {name} did not start: {told}")
            yield Proxy(ready[1], ready[2], log)
        finally:
            process.terminate()
            process.wait(_READY_S)
            process.stdout.close()


def until(
    happened: Callable[[], bool], what: str, *, limit_s: float = 60.0, step_s: float = 0.1
) -> float:
    """Wait for something; return how long it took, in seconds.

    Raises:
        AssertionError: It did not happen in time.
    """
    begin_s = time.monotonic()
    while not happened():
        assert time.monotonic() < begin_s + limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(step_s)
    return time.monotonic() - begin_s
