"""Whether an audit is right: about the idle time behind other routers, and about what BR-H would gain.

    python scripts/audit_routers.py [--router jsq,vllm-router] [--minutes M] [--out build/audit]

For each router: starts emulated engines (3 prefillers, 4 ranks of 8 slots, one barrier) and the router
before them, keeps 60 requests outstanding, and runs `balanceroute audit`, which sees the engines' /metrics
only. Beside its idle share stands the one that the engines count themselves, and beside the gain that it
predicts for BR-H the gain that is then measured with BR-H in the router's place. `jsq` and other policies
are this proxy with that policy; vllm-router is installed into build/bench-venv on first use.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import hypot
from pathlib import Path
from statistics import stdev
from typing import Any, cast

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from balanceroute.proxy.core.policies import POLICIES
from balanceroute.proxy.emulate.process import emulated_engines
from balanceroute.proxy.testing.soak.proxy_process import running_proxy

# Its parts stand in a folder.
sys.path.insert(0, str(Path(__file__).parent / "proxy_bench"))

from processes import ended, free_port, wait_until_it_answers
from targets import KNOWN, installed

OTHER = KNOWN["vllm-router"]
OURS = "br-h"
RANKS, BATCH, PREFILLERS, IN_FLIGHT = 4, 8, 3, 60
MODEL = "emulated"
_WARM_UP_S = 20.0
_REQUESTS = 20_000
_PARTS = 12  # Of the time of an audit; for three minutes longer than most requests take.


@dataclass(frozen=True, slots=True)
class Found:
    """What was found behind one router.

    Attributes:
        audit: The audit's JSON.
        idle: The engines' own idle share, while it looked.
        tokens_per_s: What they emitted.
        error: Standard error of that, by the spread between parts of the time.
    """

    audit: dict[str, Any]
    idle: float
    tokens_per_s: float
    error: float


def main() -> int:
    """Run the command; return 1 if an audit says nothing of BR-H."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", default=f"jsq,{OTHER.name}", metavar="NAME,..")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each audit")
    parser.add_argument("--out", type=Path, default=Path("build/audit"))
    arguments = parser.parse_args()
    routers = arguments.router.split(",")
    for name in routers:
        if name != OTHER.name and name not in POLICIES:
            parser.error(f"--router: {name} is neither {OTHER.name} nor a policy")
    trace = _trace(arguments.out)
    found = {
        name: _audited(name, trace, arguments.minutes, arguments.out / name)
        for name in dict.fromkeys([*routers, OURS])
    }
    Console(width=110).print(_table(found))
    return int(any(one.audit["recovery"] is None for one in found.values()))


def _trace(folder: Path) -> Path:
    """Write requests, a few of which have very long prompts."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.jsonl"
    lines = []
    for number in range(_REQUESTS):
        prompt = min(12_000, round(rng.lognormvariate(6.6, 1.0)))
        output = 20 + round(rng.expovariate(1 / 80))
        told = {"arrival_s": number / 100, "prompt_tokens": prompt, "output_tokens": output}
        lines.append(json.dumps(told) + "\n")
    path.write_text("".join(lines))
    return path


def _audited(name: str, trace: Path, minutes: float, folder: Path) -> Found:
    """Audit engines behind a router under load."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--json-ready", "--port=0"]
    command += ["--exit-with-stdin", f"--prefillers={PREFILLERS}", f"--ranks={RANKS}"]
    command += [f"--batch={BATCH}", "--kv-capacity=200000", "--max-model-len=16384"]
    command += ["--step-us-per-token=5", "--prefill-base-ms=1", "--prefill-us-per-token=10"]
    with emulated_engines([*command, f"--model={MODEL}"]) as engines:
        prefill, decode = (cast("list[str]", engines[role]) for role in ("prefill", "decode"))
        with _router(name, prefill, decode, folder) as url, _loaded(url, decode[0], trace, folder):
            time.sleep(_WARM_UP_S)
            audit, seen = _audit(prefill, decode, minutes, folder)
    idle, capacity, tokens = (
        seen[-1].stats[key] - seen[0].stats[key]
        for key in ("idle_tokens", "capacity_tokens", "output_tokens")
    )
    rates = [
        (after.stats["output_tokens"] - before.stats["output_tokens"]) / (after.at_s - before.at_s)
        for before, after in pairwise(seen)
    ]
    seconds = seen[-1].at_s - seen[0].at_s
    return Found(audit, idle / capacity, tokens / seconds, stdev(rates) / len(rates) ** 0.5)


@contextmanager
def _router(name: str, prefill: list[str], decode: list[str], folder: Path) -> Iterator[str]:
    """Run a router; yield its URL."""
    if name != OTHER.name:
        flags = [f"--policy={name}", f"--batch={BATCH}", "--port=0", "--admin-port=0"]
        flags += ["--prefill", *prefill, "--decode", *decode]
        with running_proxy(flags, engines=[*prefill, *decode], folder=folder) as proxy:
            yield f"http://{proxy.host}:{proxy.port}"
        return
    port = free_port()
    command = [str(installed(OTHER)), "--vllm-pd-disaggregation", "--host=127.0.0.1"]
    command += [f"--port={port}", f"--prometheus-port={free_port()}", "--log-level=warning"]
    command += [word for one in prefill for word in ("--prefill", one, "none")]
    command += [word for one in decode for word in ("--decode", one)]
    command += ["--kv-connector=nixl", "--policy=round_robin"]
    with (
        (folder / "router.log").open("wb") as log,
        ended(subprocess.Popen(command, stdout=log, stderr=log)),
    ):
        body = json.dumps({"model": MODEL, "prompt": "t", "max_tokens": 1}).encode()
        wait_until_it_answers(port, "/v1/completions", body)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _loaded(url: str, engine: str, trace: Path, folder: Path) -> Iterator[None]:
    """Keep a router busy; the engines are told how long answers are, and no router is."""
    command = [sys.executable, "-m", "balanceroute.proxy", "replay", "--target", url]
    command += ["--trace", str(trace), "--model", MODEL, "--concurrency", str(IN_FLIGHT)]
    command += ["--emulation", engine]
    with (folder / "replay.txt").open("wb") as out:
        client = subprocess.Popen(command, stdout=out, stderr=out)
        with ended(client):
            yield
            if client.poll() is not None:
                raise SystemExit(f"the load ended too early: {folder / 'replay.txt'}")


@dataclass(frozen=True, slots=True)
class Counted:
    """What the engines count since their start, and when that was."""

    stats: dict[str, Any]
    at_s: float


def _audit(
    prefill: list[str], decode: list[str], minutes: float, folder: Path
) -> tuple[dict[str, Any], list[Counted]]:
    """Return what an audit finds, and what the engines count from its first look to its last."""
    out = folder / "audit.json"
    command = [sys.executable, "-m", "balanceroute.proxy", "audit", "--json", str(out)]
    command += ["--prefill", *prefill, "--decode", *decode]
    command += ["--minutes", str(minutes), "--interval-s", "0.25"]
    with (folder / "audit.txt").open("wb") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text)
        seen = [Counted(_stats(decode[0]), time.monotonic())]
        # Then it simulates.
        for _ in range(_PARTS):
            time.sleep(60.0 * minutes / _PARTS)
            seen.append(Counted(_stats(decode[0]), time.monotonic()))
        if process.wait() != 0:
            raise SystemExit((folder / "audit.txt").read_text())
    return json.loads(out.read_text()), seen


def _stats(engine: str) -> dict[str, Any]:
    answer = httpx.get(f"{engine}/emulation/stats", trust_env=False)
    stats: dict[str, Any] = answer.json()
    return stats


def _table(found: dict[str, Found]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("router", "idle by the audit", "by the engines", "tokens/s by both"):
        table.add_column(heading, justify="left" if heading == "router" else "right")
    table.add_column("BR-H's gain predicted", justify="right")
    table.add_column("measured", justify="right")
    for name, one in found.items():
        table.add_row(
            name,
            f"{100 * one.audit['idle_fraction']:.1f} %",
            f"{100 * one.idle:.1f} %",
            f"{one.audit['output_tokens_per_s']:,.0f} / {one.tokens_per_s:,.0f}",
            _predicted(one.audit) if name != OURS else "",
            _measured(one, found[OURS]) if name != OURS else "",
        )
    return table


def _measured(before: Found, after: Found) -> str:
    ratio = after.tokens_per_s / before.tokens_per_s
    error = ratio * hypot(before.error / before.tokens_per_s, after.error / after.tokens_per_s)
    return f"{100 * (ratio - 1):+.1f} +- {100 * error:.1f} %"


def _predicted(audit: dict[str, Any]) -> str:
    if audit["recovery"] is None:
        return f"unknown: {audit['unknown']}"
    (one,) = [one for one in audit["recovery"]["predictions"] if one["policy"] == OURS]
    return f"{100 * one['gain']:+.1f} +- {100 * one['error']:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
