"""What the proxy costs beside others: CPU, memory and time by load."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.arguments import positive

from bench.targets import (
    DIRECT,
    KNOWN,
    OURS,
    ROOT,
    Target,
    balanceroute,
    checkout,
    cpu_s,
    engine,
    on_cores,
    router,
    rss_mb,
    started,
)
from experiment import right, table_head, table_row

_CLIENT_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """One load, and the figures to show."""

    name: str  # What it is called.
    flags: tuple[str, ...]  # Of client.py.
    unit: str  # What the CPU time is divided by: "events" or "requests".
    latency: str  # "transit_us" of events, or "first_us" of requests.


def loads(*, quick: bool) -> list[Load]:
    """Return the loads."""
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


def measure(load: Load, target: Target) -> dict[str, Any]:
    """Send one load to one target; return its figures."""
    pid = target.pid
    before_s = 0.0 if pid is None else cpu_s(pid)
    client = [sys.executable, str(ROOT / "scripts" / "bench" / "client.py")]
    client += ["--port", str(target.port), *map(str, target.more_ports), *load.flags]
    result = subprocess.run(client, capture_output=True, text=True, check=True, timeout=_CLIENT_S)
    figures = json.loads(result.stdout)
    row = {
        "load": load.name,
        "target": target.name,
        "errors": figures["errors"],
        "p50_us": figures[load.latency]["p50"],
        "p99_us": figures[load.latency]["p99"],
        "events_per_s": figures["events"] / figures["seconds"],
    }
    if pid is not None:
        row |= {
            "proxy_us": (cpu_s(pid) - before_s) / figures[load.unit] * 1e6,
            "rss_mb": rss_mb(pid),
        }
    return row


# The table of all turns.

Rows = list[dict[str, Any]]
_HEADINGS = (
    *("proxy CPU µs", "balanceroute / this", "p50 ms", "p99 ms", "balanceroute / this"),
    *("events/s", "of direct", "RSS MB", "errors"),
)


def report(rows: Rows, plan: list[Load], *, policy: str, ranks: int, slots: int) -> None:
    """Print the table."""
    print(
        f"balanceroute ({policy}, Python {platform.python_version()}) and others, the same engine, in turns; "
        f"{ranks} decode {'rank' if ranks == 1 else 'ranks'} of {slots:,} slots\n"
    )
    print(table_head("load", "", *right(_HEADINGS)))
    for load in plan:
        of_load = [row for row in rows if row["load"] == load.name]
        for name in dict.fromkeys(row["target"] for row in of_load if row["turn"] == 0):
            print(table_row(load.name, name, *_cells(of_load, load, name)))
    print(
        "\nMedians of the turns; ratios are taken within a turn: median (least to most). CPU time is of one "
        "event, or of one request. p50 and p99 are an event's transit from engine to client under load of "
        "streams, else the time to the (first) answer. Of direct: events per second, to those that the client "
        "takes from the engine itself."
    )


def _cells(rows: Rows, load: Load, name: str) -> list[str]:
    mine = [row for row in rows if row["target"] == name]
    streams = load.unit == "events"
    other = name not in (OURS, DIRECT)
    return [
        _median(mine, "proxy_us", 1),
        _ratios(rows, "proxy_us", OURS, name) if other else "",
        _median(mine, "p50_us", 2, 1e-3),
        _median(mine, "p99_us", 2, 1e-3),
        _ratios(rows, "p99_us", OURS, name) if other else "",
        _median(mine, "events_per_s", 0) if streams else "",
        _ratios(rows, "events_per_s", name, DIRECT) if streams and name != DIRECT else "",
        _median(mine, "rss_mb", 0),
        str(sum(row["errors"] for row in mine)),
    ]


def _median(rows: Rows, key: str, digits: int, scale: float = 1.0) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{median(values) * scale:,.{digits}f}" if values else ""


def _ratios(rows: Rows, key: str, one: str, other: str) -> str:
    by_turn: dict[int, dict[str, float]] = {}
    for row in rows:
        if key in row:
            by_turn.setdefault(row["turn"], {})[row["target"]] = row[key]
    ratios = [pair[one] / pair[other] for pair in by_turn.values() if pair.get(other)]
    if not ratios:
        return ""
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def proxy(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """What the proxy costs, side by side with other routers, another checkout of itself, and no proxy.

    All run against the same engine, in turns within one run, and every event is checked on its way. CPU
    time is the process's own and its children's; ratios are taken within a turn, so that what else the
    machine does hits both alike. Every proxy logs to a file, as its users let it. vllm-router is
    installed into build/bench-venv on first use.
    """
    _add_flags(parser)
    arguments = parser.parse_args(words)
    repeats = 2 if arguments.quick else arguments.repeats
    plan = [load for load in loads(quick=arguments.quick) if arguments.only in load.name]
    cores = sorted(os.sched_getaffinity(0))
    own, rest = (cores[:1], cores[1:]) if arguments.pin else (cores, cores)
    if not rest:
        parser.error("--pin needs two cores")
    if not plan:
        parser.error(f"no load has {arguments.only} in its name")
    routers = arguments.router or [KNOWN["vllm-router"]]
    if arguments.no_router or (arguments.against is not None and not arguments.router):
        routers = []
    flags = ["--policy", arguments.policy, "--predictor", arguments.predictor]
    flags += ["--batch", str(arguments.slots), "--pool-limit", "4096"]
    with ExitStack() as stack:
        run = stack.enter_context
        logs = Path(run(tempfile.TemporaryDirectory(prefix="bench-proxy-")))
        run(on_cores(rest))
        behind = run(engine(arguments.step_ms, ranks=arguments.ranks, slots=arguments.slots))
        with on_cores(own):
            found = [run(balanceroute(OURS, flags, behind, logs / "0"))]
            if arguments.against is not None:
                name = f"proxy of {arguments.against.parent.name}"
                found.append(run(balanceroute(name, flags, behind, logs / "1", arguments.against)))
            for number, name in enumerate(arguments.also, 2):
                more = [*flags, *(f"--{one}" for one in name.split())]
                found.append(run(balanceroute(name, more, behind, logs / str(number))))
            urls = [behind.prefill_url], behind.decode_urls
            found += [run(started(one, *urls, logs / one.name)) for one in routers]
        rows = _run(plan, [*found, behind.direct], repeats)
    report(rows, plan, policy=arguments.policy, ranks=arguments.ranks, slots=arguments.slots)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row["errors"] for row in rows))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repeats", type=positive, default=5, metavar="N")
    add("--policy", default="br-h", help="of balanceroute")
    add("--predictor", default="survival", help="of br-h")
    add("--ranks", type=positive, default=1, metavar="N", help="decode ranks; of 1 none is chosen")
    add(
        "--slots",
        type=positive,
        default=2048,
        metavar="N",
        help="streams at a time on each rank; others wait, in balanceroute's pool or in the engine",
    )
    add("--step-ms", type=float, default=20.0, metavar="MS", help="between a stream's events")
    add("--quick", action="store_true", help="a quarter of the load, 2 repeats")
    add("--only", default="", metavar="TEXT", help="loads with this in their name")
    add("--pin", action="store_true", help="the proxies on the first core, all else on the others")
    add("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    add(
        "--router",
        type=router,
        action="append",
        metavar="NAME[=COMMAND]",
        help=f"a router to compare with: {', '.join(KNOWN)}, or any other one by its command, in which "
        "{port}, {metrics_port}, {prefill} and {decode} stand for ports and URLs, and a word with {decode} or "
        "{prefill} is repeated for each; may be given more than once",
    )
    add("--no-router", action="store_true", help="without any other router")
    add(
        "--with",
        dest="also",
        action="append",
        default=[],
        metavar="NAME=VALUE ..",
        help="balanceroute with these flags of `serve` too, as native=off; may be given more than once",
    )
    add(
        "--against",
        type=checkout,
        metavar="TREE",
        help="another checkout of this repository, whose proxy is compared instead of vllm-router",
    )


def _run(plan: list[Load], all_targets: list[Target], repeats: int) -> Rows:
    """Send every load to every target, in turns; return the figures."""
    rows: Rows = []
    for turn in range(repeats):
        for load in plan:
            shift = turn % len(all_targets)
            for target in all_targets[shift:] + all_targets[:shift]:
                print(f"turn {turn}: {load.name}, {target.name}", file=sys.stderr, flush=True)
                rows.append({"turn": turn} | measure(load, target))
    return rows
