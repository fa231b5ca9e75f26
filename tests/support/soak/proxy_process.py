"""The proxy as a process of its own, and what the system says of it."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.core.errors import BalanceRouteError

# A start is half a second of one core; on a busy machine it is many times that.
_READY_S = 120.0
_GONE_S = 30.0
_READY = re.compile(r"listening on http://(\S+):(\d+), admin on http://\S+:(\d+)\n")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
# A socket's state in /proc/net/tcp (https://docs.kernel.org/networking/proc_net_tcp.html).
_LISTENING = "0A"


class ProxyProcessError(BalanceRouteError):
    """The proxy did not start."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds."""

    files: Mapping[str, int]  # Open descriptors by kind; sockets by the program at the other end.
    threads: int
    rss_mib: float


@dataclass(frozen=True, slots=True)
class ProxyProcess:
    """The proxy as it runs."""

    pid: int
    host: str
    port: int  # For clients.
    admin_port: int  # For administrators.
    engine_ports: frozenset[int]  # Of its engines.
    log: Path
    stderr: Path  # What it says beside that.

    def footprint(self) -> Footprint:
        proc = Path(f"/proc/{self.pid}")
        peers, links = self._peers(proc), []
        for entry in os.scandir(proc / "fd"):
            with suppress(FileNotFoundError):
                links.append(os.readlink(entry.path))
        peers |= self._peers(proc)  # Some may have been opened since.
        files: Counter[str] = Counter()
        for link in links:
            match = _SOCKET.fullmatch(link)
            files["files" if match is None else peers.get(match[1], "other sockets")] += 1
        status = (proc / "status").read_text()
        numbers = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+)", status)}
        return Footprint(files, numbers["Threads"], numbers["VmRSS"] / 1024)

    async def suspend(self, seconds: float) -> None:
        """Let it stand still, as a stopped machine or a long collection of garbage does."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _peers(self, proc: Path) -> dict[str, str]:
        """Return whom each socket of the machine leads to, by its inode."""
        found = {}
        for line in (proc / "net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            local, remote = (int(word.rpartition(":")[2], 16) for word in words[1:3])
            found[words[9]] = self._peer(local, remote, words[3])
        return found

    def _peer(self, local: int, remote: int, state: str) -> str:
        if state == _LISTENING:
            return "listeners"
        if local == self.port:
            return "clients"
        if local == self.admin_port:
            return "administrators"
        return "engines" if remote in self.engine_ports else "other sockets"


@contextmanager
def running_proxy(
    flags: Sequence[str], *, engines: Sequence[str], folder: Path
) -> Iterator[ProxyProcess]:
    """Run `balanceroute serve`, and end it.

    Raises:
        ProxyProcessError: It did not start.
    """
    log, stderr = folder / "proxy.log", folder / "proxy.stderr"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "balanceroute.proxy", "serve", *flags, "--log", str(log)]
    with stderr.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, bufsize=0
        )
    assert process.stdout is not None
    try:
        readable = select.select([process.stdout], [], [], _READY_S)[0]
        ready = _READY.fullmatch(process.stdout.readline().decode()) if readable else None
        if ready is None:
            raise ProxyProcessError(f"the proxy did not start: {stderr.read_text()}")
        ports = frozenset(int(url.rpartition(":")[2]) for url in engines)
        yield ProxyProcess(process.pid, ready[1], int(ready[2]), int(ready[3]), ports, log, stderr)
    finally:
        process.terminate()
        try:
            process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
