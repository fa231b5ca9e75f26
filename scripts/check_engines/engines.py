"""Real vLLM engines on loopback: started, asked for their metrics, killed, and ended in any case."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import create_server

import httpx
from client import CLIENT
from environment import MODELS, VARIABLES, VENV

# Three at once on two cores.
_START_S = 900.0
_END_S = 20.0
# Below those that systems give away.
_PORTS = iter(random.sample(range(12_000, 30_000, 4), 4_500))
BLOCK_TOKENS = 32
_COMMON = [
    "--dtype=float32",
    "--max-model-len=2048",
    f"--block-size={BLOCK_TOKENS}",
    "--num-gpu-blocks-override=512",
    "--max-num-seqs=64",
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--served-model-name=tiny",
    "--host=127.0.0.1",
    "--enable-auto-tool-choice",
    "--enable-scale-out",
    "--tool-call-parser=hermes",
]
_ENVIRONMENT = VARIABLES | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # /pause, /resume, /abort_requests.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
}
_SAMPLE = re.compile(r"(?P<name>[a-z_:]+)(\{(?P<labels>[^}]*)\})? (?P<value>\S+)")


@dataclass(frozen=True)
class Order:
    """How to start one engine.

    Attributes:
        name: Of its log.
        model: A folder in `MODELS`.
        kv_transfer: The connector's configuration, JSON.
        flags: Further ones of `vllm serve`.
        environment: Further variables.
        kv_ports: Where it publishes its KV cache events, and sends them again; None for nowhere.
    """

    name: str
    model: str
    kv_transfer: str
    flags: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    kv_ports: tuple[int, int] | None = None


class Engine:
    """One engine in its own process group."""

    def __init__(self, order: Order, folder: Path) -> None:
        self.name = order.name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._kv_ports = order.kv_ports
        self.log = folder / f"{order.name}.log"
        command = [str(VENV / "bin" / "vllm"), "serve", str(MODELS / order.model), *_COMMON]
        command += [f"--port={self.port}", f"--kv-transfer-config={order.kv_transfer}"]
        command += order.flags
        if order.kv_ports is not None:
            events, replay = (f"tcp://*:{port}" for port in order.kv_ports)
            config = {"enable_kv_cache_events": True, "endpoint": events}
            command.append(f"--kv-events-config={json.dumps(config | {'replay_endpoint': replay})}")
        self._command = command
        environment = os.environ | _ENVIRONMENT | dict(order.environment or {})
        environment["PATH"] = f"{VENV / 'bin'}:{environment['PATH']}"
        # Half of an engine's start is imports, twice as long without the bytecode of the first.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environment = environment
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def restart(self) -> None:
        """Start it again, if it lives or not, and wait until it serves."""
        self.end()
        self._start()
        self.wait(time.monotonic() + _START_S)

    @property
    def kv_addresses(self) -> tuple[str, str]:
        """Where it publishes its KV cache events, and sends them again."""
        assert self._kv_ports is not None
        events, replay = (f"tcp://127.0.0.1:{port}" for port in self._kv_ports)
        return events, replay

    def wait(self, deadline_s: float) -> None:
        """Wait until it serves."""
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                tail = self.log.read_text(errors="replace")[-3000:]
                raise SystemExit(f"engine {self.name} did not start:\n{tail}")
            try:
                if CLIENT.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        return metric(self.url, name, **labels)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it, as a machine that swaps does: it keeps its connections and answers nobody."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            # It may have been killed meanwhile.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask_to_end(self) -> None:
        """Tell it to end, and do not wait."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)

    def end(self) -> None:
        """End it, and all its processes."""
        with suppress(subprocess.TimeoutExpired):
            self.ask_to_end()
            self._process.wait(_END_S)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


@contextmanager
def running(orders: Sequence[Order], folder: Path) -> Iterator[list[Engine]]:
    """Run engines, started at the same time."""
    with ExitStack() as stack:
        engines: list[Engine] = []
        for order in orders:
            engine = Engine(order, folder)
            stack.callback(engine.end)
            engines.append(engine)
        # The last callback runs first: all of them end at the same time.
        stack.callback(_ask_to_end, engines)
        deadline_s = time.monotonic() + _START_S
        for engine in engines:
            engine.wait(deadline_s)
        yield engines


def _ask_to_end(engines: Sequence[Engine]) -> None:
    for engine in engines:
        engine.ask_to_end()


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric at `url` that have these labels."""
    total = 0.0
    for line in CLIENT.get(f"{url}/metrics", timeout=10.0).text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None and sample["name"] == name:
            has = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"] or ""))
            if labels.items() <= has.items():
                total += float(sample["value"])
    return total


def free_port(count: int = 1) -> int:
    """Return the first of up to four ports in a row that nobody listens on, never the same twice.

    An engine listens a minute after it was told, and meanwhile any connection may take a port of those
    that the system gives away. So none of these is returned.
    """
    while True:
        port = next(_PORTS)
        with ExitStack() as stack, suppress(OSError):
            for one in range(port, port + count):
                stack.enter_context(create_server(("127.0.0.1", one)))
            return port
