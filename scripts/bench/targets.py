"""What a load is sent to: this proxy, another checkout of it, other routers, and the engine itself."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from socket import create_server
from typing import Any

from checks.fleet import environment

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


# What the load is sent to: this proxy, another checkout of it, other routers, and the engine
# itself.

ROOT = Path(__file__).parents[2]
OURS = "balanceroute"
DIRECT = "direct"
# Runs `balanceroute` with a thread that stands in its way. Ten times a second it holds Python's interpreter lock
# for 50 ms, as a long garbage collection or a large computation does. It sleeps meanwhile, so that it takes no core
# from anybody: what a stream then waits for is Python, not a processor.
STALLING = """
import ctypes, runpy, threading, time
usleep = ctypes.PyDLL(None).usleep  # Of a PyDLL, calls keep the lock.
def stall():
    while True:
        time.sleep(0.05)
        usleep(50_000)
threading.Thread(target=stall, daemon=True).start()
runpy.run_module("balanceroute.proxy", run_name="__main__")
"""
_VENV = ROOT / "build" / "bench-venv"


@dataclass(frozen=True, slots=True)
class Target:
    """Something to send the load to."""

    name: str  # For the table.
    port: int  # Where it listens.
    process: Process | None  # None for the engine itself.
    others: tuple[int, ...] = ()  # Ports that have equal shares of the load with the first.


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of all targets: one process, prefiller and decode ranks."""

    prefill: int  # The prefiller's port.
    decode: tuple[int, ...]  # A port of each rank.
    process: Process  # All of them.

    @property
    def prefill_url(self) -> str:
        return _url(self.prefill)

    @property
    def decode_urls(self) -> list[str]:
        return list(map(_url, self.decode))

    @property
    def direct(self) -> "Target":
        """Its ranks as a target, with equal shares of the load."""
        first, *others = self.decode
        return Target(DIRECT, first, None, tuple(others))


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


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Another Python, which runs this proxy again."""

    path: Path  # The program.
    version: str  # What it says it is.


@dataclass(frozen=True, slots=True)
class Variant:
    """A proxy of this repository, and how it is run."""

    name: str  # For the table.
    flags: list[str]  # Of `serve`.
    source: Path = ROOT / ".src"  # What it imports.
    python: Path | None = None  # None for this interpreter.
    program: tuple[str, str] = ("-m", "balanceroute.proxy")


KNOWN = {
    "vllm-router": Router(
        "vllm-router",
        "vllm-router --vllm-pd-disaggregation --host 127.0.0.1 --port {port} '--prefill {prefill} none' "
        "--decode={decode} --kv-connector nixl --policy round_robin --prometheus-port {metrics_port} "
        "--log-level info",
        "vllm-router==0.1.17",
    ),
    # It adds no parameters for NIXL here: over HTTP it learns an engine's connector from Kubernetes.
    "smg": Router(
        "smg",
        "smg launch --pd-disaggregation --host 127.0.0.1 --port {port} '--prefill {prefill} none' "
        "--decode={decode} --policy round_robin --prometheus-port {metrics_port} --log-level info",
        "smg==1.13.0",
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


def interpreter(text: str) -> Interpreter:
    """Return a Python that can be run."""
    try:
        said = subprocess.run([text, "-V"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no interpreter: {error}") from None
    return Interpreter(Path(text), said.stdout.strip())


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
        yield Engine(prefill, tuple(decode), process)


def variants(arguments: argparse.Namespace, flags: list[str]) -> list[Variant]:
    """Return the proxies of this repository that a command line asks for: this one, and others beside it."""
    found = [Variant(OURS, flags)]
    if arguments.against is not None:
        name = f"proxy of {arguments.against.parent.name}"
        found.append(Variant(name, flags, source=arguments.against))
    if arguments.stalled:
        found.append(Variant("stalled", flags, program=("-c", STALLING)))
    if arguments.without_native:
        found.append(Variant("native off", [*flags, "--native", "off"]))
    for count in arguments.native_threads:
        threads = ["--native", "require", "--native-threads", str(count)]
        found.append(Variant(f"{count} native thread{'s' * (count > 1)}", [*flags, *threads]))
    for name, one in by_name(arguments.python).items():
        found.append(Variant(name, flags, python=one.path))
    return found


@contextmanager
def targets(
    engine: Engine,
    variants: Sequence[Variant],
    routers: Sequence[Router],
    logs: Path,
) -> Iterator[list[Target]]:
    """Start proxies and other routers, each with a log of its own in a folder; yield them and the engine."""
    with ExitStack() as stack:
        run = stack.enter_context
        found = [
            run(balanceroute(one, engine, logs / str(number)))
            for number, one in enumerate(variants)
        ]
        found += [
            run(started(one, [engine.prefill_url], engine.decode_urls, logs / one.name))
            for one in routers
        ]
        yield [*found, engine.direct]


@contextmanager
def balanceroute(one: Variant, engine: Engine, log: Path) -> Iterator[Target]:
    """Run one of the proxies of this repository."""
    command = [
        str(one.python or sys.executable),
        *one.program,
        "serve",
        "--port",
        "0",
        "--no-admin",
    ]
    command += ["--log", str(log), *one.flags]
    command += ["--prefill", engine.prefill_url, "--decode", *engine.decode_urls]
    environment = os.environ | {"PYTHONPATH": str(one.source)}
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, text=True, env=environment)
        stack.enter_context(ended(process))
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise SystemExit(f"{one.name} does not start: {command[0]} says why above")
        yield Target(one.name, int(said.rsplit(":", 1)[1]), process)


def by_name(pythons: Sequence[Interpreter]) -> dict[str, Interpreter]:
    """Return each interpreter by its version, and by its path too where another one says the same."""
    versions = [one.version for one in pythons]
    return {
        one.version if versions.count(one.version) == 1 else f"{one.version}, {one.path}": one
        for one in pythons
    }


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
        wait_until_it_answers(port, "/v1/completions", body)
        yield Target(one.name, port, process)


def installed(one: Router) -> Path:
    """Return a router's program, installed if it is not there."""
    return environment(_VENV / one.name, one.package).with_name(one.name)
