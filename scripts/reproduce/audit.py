"""Whether an audit is right, live."""

import argparse
import json
import random
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from signal import SIGINT
from statistics import fmean, stdev
from typing import Any

import httpx
from tests.support.arguments import positive

from balanceroute.proxy.core.policies import POLICIES
from bench.targets import KNOWN, ended, free_port, installed, wait_until_it_answers
from experiment import emulated, proxy_before, right, table_head, table_row

OTHER = KNOWN["vllm-router"]
OURS = "br-h"
RANKS, BATCH, PREFILLERS, IN_FLIGHT = 4, 8, 3, 60
MODEL = "emulated"
_WARM_UP_S = 20.0
_REQUESTS = 20_000
_PARTS = 12  # Of the tokens that are compared; in three minutes longer than most requests take.
_COUNT_S = 2.0  # Between two readings of the engines' counters.
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What the engines count since their start, and when that was."""

    idle_tokens: int
    capacity_tokens: int
    output_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What was found behind one router, of one load."""

    audit: dict[str, Any]  # The audit's JSON.
    counted: list[Counted]  # By the engines meanwhile, in order.

    @property
    def idle(self) -> float:
        """The engines' own idle share."""
        first, last = self.counted[0], self.counted[-1]
        idle_tokens = last.idle_tokens - first.idle_tokens
        return idle_tokens / (last.capacity_tokens - first.capacity_tokens)

    @property
    def tokens_per_s(self) -> float:
        """What the engines emitted."""
        first, last = self.counted[0], self.counted[-1]
        return (last.output_tokens - first.output_tokens) / (last.at_s - first.at_s)

    @property
    def predicted(self) -> tuple[float, float]:
        """The gain that the audit predicts for BR-H, and its standard error."""
        (one,) = [one for one in self.audit["recovery"]["predictions"] if one["policy"] == OURS]
        return one["gain"], one["error"]

    def reached_s(self, tokens: float) -> float:
        """Return when the engines had emitted so many tokens."""
        after = bisect_left(self.counted, tokens, lo=1, key=lambda one: one.output_tokens)
        last, first = self.counted[after], self.counted[after - 1]
        share = (tokens - first.output_tokens) / (last.output_tokens - first.output_tokens)
        return first.at_s + share * (last.at_s - first.at_s)


def audit(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Whether an audit is right: about the idle time behind other routers, and about what BR-H would gain.

    For each router: starts emulated engines (3 prefillers, 4 ranks of 8 slots, one barrier) and the router
    before them, keeps 60 requests outstanding, and runs `balanceroute audit`, which sees the engines' /metrics
    only. Beside its idle share stands the one that the engines count themselves, and beside the gain that it
    predicts for BR-H the gain that is then measured with BR-H in the router's place. `jsq` and other policies
    are this proxy with that policy; vllm-router is installed into build/bench-venv on first use.

    Each load is a list of requests, which every router gets in the same order. The measured gain is how much
    sooner the same tokens are there, so what happens to be long in one list does not count. With several
    loads all figures are means over them, and errors follow from the spread between them. One audit takes its
    minutes and about 50 s.
    """
    parser.add_argument("--router", default=f"jsq,{OTHER.name}", metavar="NAME,..")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each audit")
    parser.add_argument(
        "--loads", type=positive, default=1, help="lists of requests, one after the other"
    )
    parser.add_argument("--out", type=Path, default=Path("build/audit"))
    arguments = parser.parse_args(words)
    routers = arguments.router.split(",")
    for name in routers:
        if name != OTHER.name and name not in POLICIES:
            parser.error(f"--router: {name} is neither {OTHER.name} nor a policy")
    found: dict[str, list[Found]] = {name: [] for name in [*routers, OURS]}
    for load in range(arguments.loads):
        trace = _trace(arguments.out / str(load), load)
        for name, of_loads in found.items():
            of_loads.append(_audited(name, trace, arguments.minutes))
    print(_table(found))


def _trace(folder: Path, seed: int) -> Path:
    """Write requests, a few of which have very long prompts."""
    rng = random.Random(seed)
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


def _audited(name: str, trace: Path, minutes: float) -> Found:
    """Audit engines behind a router under load; what was written is beside the trace."""
    folder = trace.parent / name
    folder.mkdir(exist_ok=True)
    command = [f"--prefillers={PREFILLERS}", f"--ranks={RANKS}", f"--batch={BATCH}"]
    command += ["--kv-capacity=200000", "--max-model-len=16384", "--step-us-per-token=5"]
    command += ["--prefill-base-ms=1", "--prefill-us-per-token=10", f"--model={MODEL}"]
    with emulated(command) as urls:
        prefill, decode = urls["prefill"], urls["decode"]
        with _router(name, prefill, decode, folder) as url, _loaded(url, decode[0], trace, folder):
            time.sleep(_WARM_UP_S)
            found = _audit(prefill, decode, minutes, folder)
    return found


@contextmanager
def _router(name: str, prefill: list[str], decode: list[str], folder: Path) -> Iterator[str]:
    """Run a router; yield its URL."""
    if name != OTHER.name:
        flags = [f"--policy={name}", f"--batch={BATCH}"]
        with proxy_before({"prefill": prefill, "decode": decode}, flags, folder) as proxy:
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
    report = folder / "replay.json"
    command += ["--emulation", engine, "--json", str(report)]
    with (folder / "replay.txt").open("wb") as out:
        client = subprocess.Popen(command, stdout=out, stderr=out)
        with ended(client):
            yield
            if client.poll() is not None:
                raise SystemExit(f"the load ended too early: {folder / 'replay.txt'}")
            client.send_signal(SIGINT)
            client.wait(_END_S)
    (figures,) = json.loads(report.read_text())["results"]
    if figures["wrong_lengths"] or figures["errors"]:
        # Another load than behind the other routers.
        raise SystemExit(f"requests failed, or answers were not as long as asked: {report}")


def _audit(prefill: list[str], decode: list[str], minutes: float, folder: Path) -> Found:
    """Return what an audit finds, and what the engines count meanwhile."""
    out = folder / "audit.json"
    command = [sys.executable, "-m", "balanceroute.proxy", "audit", "--json", str(out)]
    command += ["--prefill", *prefill, "--decode", *decode]
    command += ["--minutes", str(minutes), "--interval-s", "0.25"]
    with (folder / "audit.txt").open("wb") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text)
        counted = [_count(decode[0])]
        # Then it simulates.
        while counted[-1].at_s < counted[0].at_s + 60.0 * minutes:
            time.sleep(_COUNT_S)
            counted.append(_count(decode[0]))
        if process.wait() != 0:
            raise SystemExit((folder / "audit.txt").read_text())
    audit = json.loads(out.read_text())
    if audit["recovery"] is None:
        raise SystemExit(f"nothing is predicted: {audit['unknown']}")
    return Found(audit, counted)


def _count(engine: str) -> Counted:
    at_s = time.monotonic()
    stats = httpx.get(f"{engine}/emulation/stats", trust_env=False).json()
    return Counted(stats["idle_tokens"], stats["capacity_tokens"], stats["output_tokens"], at_s)


def _table(found: dict[str, list[Found]]) -> str:
    names = ("idle by the audit", "by the engines", "tokens/s by both")
    lines = [
        table_head("router", *right([*names, "BR-H's gain predicted", "measured", "difference"]))
    ]
    for name, of_loads in found.items():
        idle = [
            fmean(one.audit["idle_fraction"] for one in of_loads),
            fmean(one.idle for one in of_loads),
        ]
        audited = fmean(one.audit["output_tokens_per_s"] for one in of_loads)
        emitted = fmean(one.tokens_per_s for one in of_loads)
        gains = ["", "", ""] if name == OURS else _gains(of_loads, found[OURS])
        shares = (f"{100 * share:.1f} %" for share in idle)
        lines.append(table_row(name, *shares, f"{audited:,.0f} / {emitted:,.0f}", *gains))
    return "\n".join(lines)


def _gains(before: list[Found], after: list[Found]) -> list[str]:
    """Return BR-H's gain as predicted and as measured, and the difference of the two."""
    predicted = [one.predicted for one in before]
    measured = [_measured(*pair) for pair in zip(before, after, strict=True)]
    gains = [[gain for gain, _ in pairs] for pairs in (predicted, measured)]
    differences = [told - true for told, true in zip(*gains, strict=True)]
    if len(before) == 1:
        return [_percent(*predicted[0]), _percent(*measured[0]), f"{100 * differences[0]:+.1f} %"]
    return [
        _percent(fmean(values), stdev(values) / len(values) ** 0.5)
        for values in (*gains, differences)
    ]


def _measured(before: Found, after: Found) -> tuple[float, float]:
    """Return how much sooner the same tokens came, and its standard error by the parts of them."""
    both = before, after
    first = max(one.counted[0].output_tokens for one in both)
    last = min(one.counted[-1].output_tokens for one in both)
    edges = [first + (last - first) * part / _PARTS for part in range(_PARTS + 1)]
    took, takes = (
        [end_s - begin_s for begin_s, end_s in pairwise(map(one.reached_s, edges))] for one in both
    )
    ratio = sum(took) / sum(takes)
    misses = [slow - ratio * quick for slow, quick in zip(took, takes, strict=True)]
    return ratio - 1.0, stdev(misses) / len(misses) ** 0.5 / fmean(takes)


def _percent(gain: float, error: float) -> str:
    return f"{100 * gain:+.1f} +- {100 * error:.1f} %"
