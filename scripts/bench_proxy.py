"""What the proxy costs, side by side with vllm-router, another checkout of itself, and no proxy.

All run against the same engine, in turns within one run, and every event is checked on its way. CPU
time is the process's own and its children's; ratios are taken within a turn, so that what else the
machine does hits both alike. Every proxy logs to a file, as its users let it. vllm-router is installed into build/bench-venv on first use.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
ROUTER = "vllm-router==0.1.17"
ROUTER_VENV = ROOT / "build" / "bench-venv"
_TICK_S = 0.01  # Of the kernel's CPU times.
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """One load, and what is looked at.

    Attributes:
        name: What it is called.
        flags: Of bench_client.py.
        unit: What the CPU time is divided by: "events" or "requests".
        latency: "transit_us" of events, or "first_us" of requests.
    """

    name: str
    flags: tuple[str, ...]
    unit: str
    latency: str


def loads(*, quick: bool) -> list[Load]:
    """Return the loads."""
    part = 4 if quick else 1

    def of(name: str, unit: str, latency: str, **flags: int) -> Load:
        words = [(f"--{key.replace('_', '-')}", str(value)) for key, value in flags.items()]
        return Load(name, tuple(word for pair in words for word in pair), unit, latency)

    return [
        of(
            "256 streams", "events", "transit_us", connections=256, requests=256, tokens=200 // part
        ),
        of(
            "1,024 streams",
            "events",
            "transit_us",
            connections=1024,
            requests=1024,
            tokens=100 // part,
        ),
        of("1 token", "requests", "first_us", connections=16, requests=6000 // part),
        of(
            "1 token, streamed",
            "requests",
            "first_us",
            connections=1,
            requests=2000 // part,
            tokens=1,
        ),
        of(
            "1 MiB prompt",
            "requests",
            "first_us",
            connections=2,
            requests=120 // part,
            prompt_bytes=1 << 20,
        ),
        of("burst of 1,024", "requests", "first_us", connections=1024, requests=1024),
    ]


@dataclass(frozen=True, slots=True)
class Target:
    """Something to send the load to; `process` is None for the engine itself."""

    name: str
    port: int
    process: "subprocess.Popen[Any] | None"


def main() -> int:
    """Run the benchmark; return 1 if anything was dropped or reordered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--policy", default="br-h", help="of balanceroute (default: br-h)")
    parser.add_argument("--predictor", default="survival", help="of br-h (default: survival)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the load, 2 repeats")
    parser.add_argument("--no-router", action="store_true", help="without vllm-router")
    parser.add_argument(
        "--against",
        type=checkout,
        metavar="TREE",
        help="another checkout of this repository, whose proxy is compared instead of vllm-router",
    )
    parser.add_argument(
        "--pin",
        action="store_true",
        help="run the proxies on the first core, the engine and the clients on the others",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    arguments = parser.parse_args()
    repeats = 2 if arguments.quick else arguments.repeats
    plan = loads(quick=arguments.quick)
    rows: list[dict[str, Any]] = []
    cores = sorted(os.sched_getaffinity(0))
    own, others = (cores[:1], cores[1:]) if arguments.pin else (cores, cores)
    if not others:
        parser.error("--pin needs two cores")
    with (
        on_cores(others),
        engine() as (prefill, decode),
        proxies(prefill, decode, arguments, own) as targets,
    ):
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=repeats * len(plan) * len(targets))
            for turn in range(repeats):
                for load in plan:
                    shift = turn % len(targets)
                    for target in targets[shift:] + targets[:shift]:
                        bar.update(task, description=f"{load.name}, {target.name}")
                        rows.append({"turn": turn} | measure(load, target))
                        bar.advance(task)
    report(rows, plan, other=targets[1].name, policy=arguments.policy)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row["errors"] for row in rows))


def checkout(text: str) -> Path:
    """Return the directory of the import package of another checkout."""
    source = Path(text).resolve() / ".src"
    if not (source / "balanceroute" / "proxy").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no checkout: {source} has no balanceroute")
    return source


@contextmanager
def engine() -> "Iterator[tuple[int, int]]":
    """Run the engine; yield its prefill and its decode port."""
    with ended(
        subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "bench_engine.py"],
            stdout=subprocess.PIPE,
            text=True,
        )
    ) as process:
        assert process.stdout is not None
        prefill, decode = map(int, process.stdout.readline().split())
        yield prefill, decode


@contextmanager
def proxies(
    prefill: int, decode: int, arguments: argparse.Namespace, cores: list[int]
) -> "Iterator[list[Target]]":
    """Run the proxies on some cores; yield them and the engine."""
    with tempfile.TemporaryDirectory(prefix="bench-proxy-") as logs, ExitStack() as stack:
        with on_cores(cores):
            targets = stack.enter_context(started(prefill, decode, arguments, Path(logs)))
        yield targets


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
def started(
    prefill: int, decode: int, arguments: argparse.Namespace, logs: Path
) -> "Iterator[list[Target]]":
    """Start the proxies, each with a log of its own; yield them and the engine."""
    urls = [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
    direct = Target("direct", decode, None)
    with balanceroute("balanceroute", urls, arguments, ROOT / ".src", logs / "ours") as ours:
        if arguments.against is not None:
            name = f"proxy of {arguments.against.parent.name}"
            with balanceroute(name, urls, arguments, arguments.against, logs / "other") as other:
                yield [ours, other, direct]
            return
        if arguments.no_router:
            yield [ours, direct]
            return
        port, metrics = free_port(), free_port()
        theirs = [
            str(router()),
            "--vllm-pd-disaggregation",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        theirs += ["--prefill", urls[0], "none", "--decode", urls[1], "--kv-connector", "nixl"]
        theirs += ["--policy", "round_robin", "--prometheus-port", str(metrics)]
        theirs += ["--log-level", "info"]
        with (
            (logs / "other").open("wb") as log,
            ended(subprocess.Popen(theirs, stdout=log, stderr=log)) as process,
        ):
            wait_until_healthy(port)
            yield [ours, Target("vllm-router", port, process), direct]


@contextmanager
def balanceroute(
    name: str, urls: list[str], arguments: argparse.Namespace, source: Path, log: Path
) -> "Iterator[Target]":
    """Run the proxy of a checkout."""
    command = [sys.executable, "-m", "balanceroute.proxy", "serve", "--port", "0", "--no-admin"]
    command += ["--log", str(log), "--policy", arguments.policy, "--batch", "2048"]
    command += ["--predictor", arguments.predictor]
    command += ["--pool-limit", "4096", "--prefill", urls[0], "--decode", urls[1]]
    environment = os.environ | {"PYTHONPATH": str(source)}
    with ended(
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        yield Target(name, port, process)


@contextmanager
def ended(process: "subprocess.Popen[Any]") -> "Iterator[subprocess.Popen[Any]]":
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


def router() -> Path:
    """Return vllm-router's command, installed if it is not there."""
    command = ROUTER_VENV / "bin" / "vllm-router"
    if not command.exists():
        print(f"installing {ROUTER} into {ROUTER_VENV}", file=sys.stderr)
        venv.create(ROUTER_VENV, with_pip=True)
        pip = ROUTER_VENV / "bin" / "pip"
        subprocess.run([pip, "install", "-q", "--disable-pip-version-check", ROUTER], check=True)
    return command


def free_port() -> int:
    """Return a port that nobody listens on."""
    with create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(port: int) -> None:
    """Wait until a server answers on /health."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def measure(load: Load, target: Target) -> dict[str, Any]:
    """Send one load to one target; return its figures."""
    before = cpu_s(target.process)
    client = [sys.executable, str(ROOT / "scripts" / "bench_client.py")]
    client += ["--port", str(target.port)]
    result = subprocess.run(
        [*client, *load.flags], capture_output=True, text=True, check=True, timeout=300
    )
    figures = json.loads(result.stdout)
    row = {
        "load": load.name,
        "target": target.name,
        "errors": figures["errors"],
        "p50_us": figures[load.latency]["p50"],
        "p99_us": figures[load.latency]["p99"],
        "first_p50_us": figures["first_us"]["p50"],
        "events_per_s": figures["events"] / figures["seconds"],
    }
    if target.process is not None:
        row["cpu_us"] = (cpu_s(target.process) - before) / figures[load.unit] * 1e6
        row["rss_mb"] = sum(rss_mb(pid) for pid in family(target.process.pid))
    return row


def cpu_s(process: "subprocess.Popen[Any] | None") -> float:
    """Return the CPU time of a process and its children so far, in seconds."""
    if process is None:
        return 0.0
    ticks = 0
    for pid in family(process.pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process, in MB."""
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


def report(rows: list[dict[str, Any]], plan: list[Load], *, other: str, policy: str) -> None:
    """Print the table."""
    table = Table(
        title=f"balanceroute ({policy}) and {other}, the same engine, in turns",
        caption=f"Medians of the turns; x is balanceroute / {other} within a turn: median "
        "(least to most). p50 and p99 are an event's transit from engine to client under load of "
        "streams, else the time to the (first) answer.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("load", no_wrap=True)
    table.add_column("", no_wrap=True)
    headings = ("CPU µs\neach", "x", "p50 ms", "p99 ms", "x", "events/s", "RSS MB", "errors")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for load in plan:
        for name in dict.fromkeys(row["target"] for row in rows):
            mine = [row for row in rows if row["load"] == load.name and row["target"] == name]
            ours = name == "balanceroute"
            table.add_row(
                load.name if ours else "",
                name,
                _median(mine, "cpu_us", 1),
                _ratios(rows, load, "cpu_us", other) if ours else "",
                _median(mine, "p50_us", 2, 1e-3),
                _median(mine, "p99_us", 2, 1e-3),
                _ratios(rows, load, "p99_us", other) if ours else "",
                _median(mine, "events_per_s", 0) if load.unit == "events" else "",
                _median(mine, "rss_mb", 0),
                str(sum(row["errors"] for row in mine)),
                end_section=name == "direct",
            )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def _median(rows: list[dict[str, Any]], key: str, digits: int, scale: float = 1.0) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{median(values) * scale:,.{digits}f}" if values else ""


def _ratios(rows: list[dict[str, Any]], load: Load, key: str, other: str) -> str:
    by_turn: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["load"] == load.name and key in row:
            by_turn.setdefault(row["turn"], {})[row["target"]] = row[key]
    ratios = [pair["balanceroute"] / pair[other] for pair in by_turn.values() if pair.get(other)]
    if not ratios:
        return ""
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
