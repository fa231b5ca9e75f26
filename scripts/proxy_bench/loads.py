"""The loads, each sent by a client process of its own, and what one costs."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from processes import cpu_s, rss_mb
from targets import ROOT, Engine, Target

_CLIENT_S = 300.0


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


def loads(*, quick: bool, stalled: bool = False) -> list[Load]:
    """Return the loads; those for a proxy that stalls are so long that few events are a stream's first."""
    part = 4 if quick else 1

    def of(name: str, unit: str, latency: str, *more: str, **flags: int) -> Load:
        words = [(f"--{key.replace('_', '-')}", str(value)) for key, value in flags.items()]
        return Load(name, (*(word for pair in words for word in pair), *more), unit, latency)

    def streams(count: int, tokens: int) -> Load:
        flags = {"connections": count, "requests": count, "tokens": tokens // part}
        return of(f"{count:,} streams", "events", "transit_us", **flags)

    def requests(name: str, connections: int, count: int, *more: str, **flags: int) -> Load:
        flags |= {"connections": connections, "requests": count}
        return of(name, "requests", "first_us", *more, **flags)

    if stalled:
        return [streams(64, 1500)]
    return [
        streams(256, 200),
        streams(1024, 100),
        requests("1 token", 16, 6000 // part),
        # With many in flight their wake-ups are shared.
        requests("1 token, 64 in flight", 64, 6000 // part),
        requests("1 token, streamed", 1, 2000 // part, tokens=1),
        # Streams end and begin with every step, as in a fleet that is in use.
        requests("20 tokens, 256 in flight", 256, 3072 // part, "--mixed", tokens=20),
        requests("1 MiB prompt", 2, 120 // part, prompt_bytes=1 << 20),
        requests("burst of 1,024", 1024, 1024),
    ]


def measure(load: Load, target: Target, engine: Engine) -> dict[str, Any]:
    """Send one load to one target; return its figures."""
    processes = {"engine": engine.process}
    if target.process is not None:
        processes["proxy"] = target.process
    before_s = {name: cpu_s(one.pid) for name, one in processes.items()}
    client = [sys.executable, str(ROOT / "scripts" / "bench_client.py")]
    client += ["--port", str(target.port), *map(str, target.others), *load.flags]
    result = subprocess.run(client, capture_output=True, text=True, check=True, timeout=_CLIENT_S)
    figures = json.loads(result.stdout)
    spent_s = {name: cpu_s(one.pid) - before_s[name] for name, one in processes.items()}
    spent_s["client"] = figures["cpu_s"]
    row = {
        "load": load.name,
        "target": target.name,
        "errors": figures["errors"],
        "p50_us": figures[load.latency]["p50"],
        "p99_us": figures[load.latency]["p99"],
        "first_p50_us": figures["first_us"]["p50"],
        "events_per_s": figures["events"] / figures["seconds"],
    }
    for name, seconds in spent_s.items():
        row[f"{name}_us"] = seconds / figures[load.unit] * 1e6
    if target.process is not None:
        row["rss_mb"] = rss_mb(target.process)
    return row
