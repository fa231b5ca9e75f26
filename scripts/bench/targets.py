"""What a load is sent to: this proxy, another checkout of it, other routers, and the engine itself."""

import argparse
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Any

import httpx

from checks.fleet import environment

Process = subprocess.Popen[Any]
_TICK_S = 0.01  # Of the kernel's CPU times.
_START_S = 30.0


@contextmanager
def on_cores(cores: list[int]) -> "Iterator[None]":
    """Run on some cores, as processes started meanwhile do."""
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
    """Return a port without a listener."""
    with create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_it_answers(url: str, body: bytes) -> None:
    """Wait until a server answers a request with a status of 2xx."""
    headers, status = {"content-type": "application/json"}, 0
    deadline_s = time.monotonic() + _START_S
    while status // 100 != 2:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{url} answers with status {status}")
        time.sleep(0.1)
        with suppress(httpx.TransportError):
            answer = httpx.post(url, content=body, headers=headers, timeout=5.0, trust_env=False)
            status = answer.status_code


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children so far, in seconds."""
    ticks = 0
    for one in family(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process and its children, in MB."""
    pages = (Path(f"/proc/{one}/statm").read_text().split()[1] for one in family(pid))
    return sum(map(int, pages)) * resource.getpagesize() / 2**20


def family(pid: int) -> list[int]:
    """Return a process and all that came of it."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return [pid, *(one for child in children for one in family(child))]


ROOT = Path(__file__).parents[2]
OURS = "balanceroute"
DIRECT = "direct"
_VENV = ROOT / "build" / "bench-venv"


@dataclass(frozen=True, slots=True)
class Target:
    """Something to send the load to."""

    name: str  # For the table.
    port: int  # Where it listens.
    pid: int | None  # Of its process; None for the engine itself.
    more_ports: tuple[int, ...] = ()  # Ports that have equal shares of the load with the first.


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of all targets: one process, prefiller and decode ranks."""

    prefill: int  # The prefiller's port.
    decode: tuple[int, ...]  # A port of each rank.

    @property
    def prefill_url(self) -> str:
        return _url(self.prefill)

    @property
    def decode_urls(self) -> list[str]:
        return list(map(_url, self.decode))

    @property
    def direct(self) -> "Target":
        """Its ranks as a target, with equal shares of the load."""
        first, *more_ports = self.decode
        return Target(DIRECT, first, None, tuple(more_ports))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@dataclass(frozen=True, slots=True)
class Router:
    """Another router."""

    name: str  # For the table.
    # With the places {port}, {metrics_port}, {prefill} and {decode}; the latter are URLs. A word with one of
    # these, which may be several in quotes, is repeated for each.
    command: str
    package: str = ""  # What to install for it, if its program is not there.


KNOWN = {
    "vllm-router": Router(
        "vllm-router",
        "vllm-router --vllm-pd-disaggregation --host 127.0.0.1 --port {port} '--prefill {prefill} none' "
        "--decode={decode} --kv-connector nixl --policy round_robin --prometheus-port {metrics_port} "
        "--log-level info",
        "vllm-router==0.1.17",
    ),
}


def router(text: str) -> Router:
    """Return a router by its name, or by `NAME=COMMAND`."""
    name, mark, command = text.partition("=")
    if not mark:
        if name not in KNOWN:
            known = ", ".join(KNOWN)
            raise argparse.ArgumentTypeError(f"{name} is none of {known}: say NAME=COMMAND")
        return KNOWN[name]
    if "{port}" not in command:
        raise argparse.ArgumentTypeError(f"the command of {name} has no {{port}}")
    return Router(name, command)


def checkout(text: str) -> Path:
    """Return the directory of the import package of another checkout."""
    source = Path(text).resolve() / ".src"
    if not (source / "balanceroute" / "proxy").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no checkout: {source} has no balanceroute")
    return source


@contextmanager
def engine(step_ms: float, *, ranks: int = 1, slots: int | None = None) -> Iterator[Engine]:
    """Run the engine, with so many decode ranks, each of so many streams at a time."""
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "engine.py")]
    command += ["--step-ms", str(step_ms), "--ranks", str(ranks)]
    if slots is not None:
        command += ["--slots", str(slots)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        prefill, *decode = map(int, process.stdout.readline().split())
        yield Engine(prefill, tuple(decode))


@contextmanager
def balanceroute(
    name: str, flags: Sequence[str], engine: Engine, log: Path, source: Path = ROOT / ".src"
) -> Iterator[Target]:
    """Run a proxy of this repository, or of the checkout whose `source` that is."""
    command = [sys.executable, "-m", "balanceroute.proxy", "serve", "--port", "0", "--no-admin"]
    command += ["--log", str(log), *flags, "--prefill", engine.prefill_url]
    command += ["--decode", *engine.decode_urls]
    environment = os.environ | {"PYTHONPATH": str(source)}
    pipe = subprocess.PIPE
    with ended(subprocess.Popen(command, stdout=pipe, text=True, env=environment)) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise SystemExit(f"{name} does not start: it says why above")
        yield Target(name, int(said.rsplit(":", 1)[1]), process.pid)


@contextmanager
def started(
    one: Router, prefill: Sequence[str], decode: Sequence[str], log: Path, model: str = "bench"
) -> Iterator[Target]:
    """Run another router before engines, until it answers a request as it should."""
    port = free_port()
    words = shlex.split(one.command.replace("{port}", str(port)))
    for place, urls in (
        ("{prefill}", prefill), ("{decode}", decode), ("{metrics_port}", [str(free_port())])
    ):  # fmt: skip
        words = [
            word.replace(place, url)
            for word in words
            for url in (urls if place in word else urls[:1])
        ]
    program, *flags = (part for word in words for part in word.split())
    if one.package:
        program = str(installed(one))
    with (
        log.open("wb") as out,
        ended(subprocess.Popen([program, *flags], stdout=out, stderr=out)) as process,
    ):
        body = json.dumps({"model": model, "prompt": "t", "max_tokens": 1}).encode()
        wait_until_it_answers(f"{_url(port)}/v1/completions", body)
        yield Target(one.name, port, process.pid)


def installed(one: Router) -> Path:
    """Return a router's program, installed if it is not there."""
    return environment(_VENV / one.name, one.package).with_name(one.name)
