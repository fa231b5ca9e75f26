"""The balance of decode ranks on real vLLM engines with one barrier, beside the simulator's.

One prefiller and decode servers of a data-parallel group run a mixture of experts in which attention over the
KV cache is nearly all of a step. Requests are those of the Mooncake conversation trace, their lengths divided
by 4; the length of an answer is hidden from the proxy (`stop_after`, see cpu_shim). A prompt is one of 12 whose
blocks all engines have cached, so prefill and transfer cost little, and decode is what is measured.

Processor time is that of the thread that computes: what a rank waits at the barrier or for a core costs none. Caches
and cores that others use still make a step longer.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import httpx
import numpy as np
from numpy.typing import NDArray
from tests.support.arguments import positive

from balanceroute.proxy.lab.validate.traces import read_traces
from balanceroute.traces import TraceRequest, write_native
from checks.fleet import VLLM, Engine, Fleet, Order, free_port, prepare, running, told_by
from experiment import MOONCAKE, ROOT, requests_of, right, spread, table_head, table_row

RANKS, SLOTS, OUTSTANDING = 2, 8, 48
SCALE, PROMPTS, BLOCK, LONGEST = 4, 12, 32, 12_000
LIMIT, CONTEXT = 512, 12_288
VOCABULARY = 2_048
LEASE_S = 120
WARM_UP_S = 8.0
_ANSWER_S = 600.0
POLICIES = ("jsq", "br-h")
KNOWN = ("jsq", "round-robin", "least-kv", "br-0", "br-h")
PAGE = ROOT / "docs" / "appendix" / "real_balance.md"
_TIMES = np.dtype([("wave", "<u4"), ("step", "<u4"), ("ns", "<u8")])


@dataclass(frozen=True)
class Asked:
    """A request: which of the prompts, and how many tokens its answer has."""

    prompt: int
    tokens: int


class Workload:
    """The prompts, and the requests in the order of the trace."""

    def __init__(self) -> None:
        trace = requests_of(MOONCAKE)
        lengths = sorted(min(LONGEST, one.prompt_tokens / SCALE) for one in trace)
        wanted = [lengths[int((k + 0.5) / PROMPTS * len(lengths))] for k in range(PROMPTS)]
        # A token more than whole blocks: that one is computed.
        self.sizes = [max(1, round(one / BLOCK)) * BLOCK + 1 for one in wanted]
        draw = random.Random(7)
        self.prompts = [[draw.randrange(3, VOCABULARY) for _ in range(n)] for n in self.sizes]
        self.requests = [
            Asked(self._nearest(one.prompt_tokens), max(2, round(one.output_tokens / SCALE)))
            for one in trace
        ]

    def _nearest(self, tokens: int) -> int:
        return min(range(PROMPTS), key=lambda k: abs(self.sizes[k] - tokens / SCALE))

    def write_trace(self, path: Path, first: int, count: int) -> None:
        """Write some of the requests as a trace for the simulator."""
        some = self.requests[first : first + count]
        write_native(
            path,
            (
                TraceRequest(n * 1_000_000, self.sizes[one.prompt], one.tokens, max_tokens=LIMIT)
                for n, one in enumerate(some)
            ),
        )


# The load.


@dataclass
class Outcome:
    """What became of a closed loop."""

    begin_ns: int
    end_ns: int = 0
    sent: int = 0
    whole: int = 0  # Answers with the tokens that they should have.
    wrong: int = 0  # Others, but those that the end of the run cut off.


async def ask(client: httpx.AsyncClient, url: str, prompt: Sequence[int], tokens: int) -> bool:
    """Return whether an answer has so many tokens."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": LIMIT,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"stop_after": tokens},
    }
    usage = None
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if '"usage":{' in line:
                    usage = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    except httpx.HTTPError:
        return False
    return usage == tokens


async def closed_loop(url: str, workload: Workload, first: int, seconds: float) -> Outcome:
    """Keep requests outstanding for some seconds."""
    outcome, source = Outcome(time.time_ns()), itertools.islice(workload.requests, first, None)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_ANSWER_S, limits=limits, trust_env=False) as client:

        async def one_after_another() -> None:
            for one in source:
                outcome.sent += 1
                whole = await ask(client, url, workload.prompts[one.prompt], one.tokens)
                outcome.whole, outcome.wrong = outcome.whole + whole, outcome.wrong + (not whole)

        tasks = [asyncio.create_task(one_after_another()) for _ in range(OUTSTANDING)]
        await asyncio.wait(tasks, timeout=seconds)
        outcome.end_ns = time.time_ns()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return outcome


async def warm(engines: Sequence[Engine], workload: Workload) -> None:
    """Have each engine cache each prompt."""

    async def warm_one(engine: Engine) -> None:
        for prompt in workload.prompts:
            if not await ask(client, engine.url, prompt, 2):
                raise SystemExit(f"{engine.name} does not answer a prompt of {len(prompt)} tokens")

    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
        await asyncio.gather(*map(warm_one, engines))


# What the engines' own traces say of a run.


@dataclass(frozen=True)
class Steps:
    """The steps that all ranks of the barrier took in a run."""

    loads: NDArray[np.float64]  # float64[steps, ranks], KV tokens.
    batch: NDArray[np.float64]  # float64[steps, ranks], requests.
    processor_s: NDArray[np.float64]  # float64[steps, ranks], of the thread that computes.
    prefill_tokens: int  # That the ranks computed.

    @property
    def idle(self) -> float:
        """The share of rank time that is lost at the barrier, by loads."""
        return float(1.0 - self.loads.mean(axis=1).sum() / self.loads.max(axis=1).sum())

    @property
    def processor_idle(self) -> float:
        """The same by processor time."""
        return float(1.0 - self.processor_s.mean(axis=1).sum() / self.processor_s.max(axis=1).sum())

    @property
    def empty(self) -> float:
        """The share of slots without a request."""
        return float(1.0 - self.batch.mean() / SLOTS)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks in a second of the slower one's processor time."""
        return float(self.batch.sum() / self.processor_s.max(axis=1).sum())

    def of_perfect(self, base_s: float, token_s: float) -> float:
        """The share of the output that the same batches had with perfect balance, at T = a + b max L."""
        perfect = (base_s + token_s * self.loads.mean(axis=1)).sum()
        return float(perfect / (base_s + token_s * self.loads.max(axis=1)).sum())


def steps_of(folder: Path, begin_ns: int, end_ns: int) -> Steps:
    """Return the steps within a span of time, which every rank has recorded."""
    columns: list[dict[int, tuple[float, float, float, int]]] = []
    for trace in read_traces(folder):
        times = np.fromfile(folder / f"{trace.header['dp_rank']}.times", dtype=_TIMES)
        processor = dict(zip(_places(times["wave"], times["step"]), times["ns"], strict=True))
        steps = trace.steps
        steps = steps[(steps["end_ns"] > begin_ns) & (steps["end_ns"] < end_ns)]
        places = _places(steps["wave"], steps["wave_step"])
        columns.append(
            {
                place: (
                    row["kv_tokens"],
                    row["batch"],
                    processor[place] / 1e9,
                    row["prefill_tokens"],
                )
                for place, row in zip(places, steps, strict=True)
                if place in processor
            }
        )
    common = sorted(set.intersection(*(set(column) for column in columns)))
    table = np.array([[column[place] for column in columns] for place in common], np.float64)
    return Steps(table[..., 0], table[..., 1], table[..., 2], int(table[..., 3].sum()))


def _places(wave: NDArray[np.uint32], step: NDArray[np.uint32]) -> list[int]:
    places: list[int] = ((wave.astype(np.int64) << 32) + step).tolist()
    return places


def fit(runs: Sequence[Steps]) -> tuple[float, float]:
    """Return a and b of T = a + b max L, in seconds, by the processor time of the slower rank."""
    loads = np.concatenate([one.loads.max(axis=1) for one in runs])
    times = np.concatenate([one.processor_s.max(axis=1) for one in runs])
    slope, base = np.polyfit(loads, times, 1)
    return float(base), float(slope)


# The experiment.


@dataclass(frozen=True)
class Run:
    """One policy before the engines for a while."""

    policy: str
    first: int  # The first request of the trace that was sent.
    outcome: Outcome
    steps: Steps


def orders(steps: Path) -> list[Order]:
    """Return how to start the engines."""
    common = [f"--max-model-len={CONTEXT}", "--num-gpu-blocks-override=2200"]
    common += [f"--max-num-batched-tokens={CONTEXT}", "--enable-prompt-tokens-details"]
    group = [f"--max-num-seqs={SLOTS}", f"--data-parallel-size={RANKS}"]
    group += [f"--data-parallel-rpc-port={free_port()}", "--data-parallel-address=127.0.0.1"]
    shim = {"BALANCEROUTE_CPU_SHIM": "moe-dp,nixl,fork,hidden-lengths,thread-times"}
    shim |= {"BALANCEROUTE_STEP_TRACE": str(steps)}
    # A data-parallel rank adds its number to the port.
    port = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    of_ranks = {port: str(free_port(RANKS))}

    def order(name: str, role: str, flags: Sequence[str], environment: dict[str, str]) -> Order:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_buffer_device": "cpu",
            "kv_role": role,
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        return Order(name, "attention-moe", json.dumps(transfer), [*common, *flags], environment)

    prefiller = {"BALANCEROUTE_CPU_SHIM": "nixl,fork,hidden-lengths", port: str(free_port())}
    return [
        order("prefill-0", "kv_producer", ["--max-num-seqs=64"], prefiller),
        *(
            order(
                f"decode-{i}", "kv_consumer", [*group, f"--data-parallel-rank={i}"], shim | of_ranks
            )
            for i in range(RANKS)
        ),
    ]


def pin(engines: Sequence[Engine]) -> None:
    """Give each engine core a processor of its own, as far as there are some, and let it go first."""
    for place, engine in enumerate(engines):
        for process in engine.processes("EngineCore"):
            for thread in map(int, os.listdir(f"/proc/{process}/task")):
                with suppress(OSError):
                    os.sched_setaffinity(thread, {place % (os.cpu_count() or 1)})
                    os.setpriority(os.PRIO_PROCESS, thread, -5)


def runs(arguments: argparse.Namespace, workload: Workload, folder: Path) -> Iterator[Run]:
    """Start the engines, and run each policy before them."""
    steps = folder / "steps"
    steps.mkdir()
    begin_s = time.monotonic()
    with running(orders(steps), folder) as engines:
        print(f"{len(engines)} engines in {time.monotonic() - begin_s:.0f} s", flush=True)
        asyncio.run(warm(engines, workload))
        pin(engines[1:])
        fleet = Fleet(engines[:1], engines[1:], "nixl", (), folder, steps)
        for turn in range(arguments.repeats):
            first = arguments.skip + 500 * turn
            for policy in arguments.policies:
                flags = ("--policy", policy, "--batch", str(SLOTS), "--lease-s", str(LEASE_S))
                with fleet.proxy(f"{policy} {turn}", *flags) as proxy:
                    loop = closed_loop(proxy.url, workload, first, arguments.seconds)
                    outcome = asyncio.run(loop)
                found = steps_of(steps, outcome.begin_ns + int(WARM_UP_S * 1e9), outcome.end_ns)
                print(
                    f"{policy}: {outcome.whole} whole, {outcome.wrong} wrong, {len(found.loads)} steps, "
                    f"idle {found.idle:.1%}, empty slots {found.empty:.1%}",
                    flush=True,
                )
                yield Run(policy, first, outcome, found)
                time.sleep(1.0)


def simulate(
    found: Sequence[Run], workload: Workload, model: tuple[float, float], folder: Path
) -> dict[str, list[dict[str, float]]]:
    """Return the simulator's figures of each policy, for the same requests."""
    policies = list(dict.fromkeys(one.policy for one in found))
    told: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    for first in sorted({one.first for one in found}):
        count = int(median(one.outcome.sent for one in found if one.first == first))
        trace = folder / f"{first}.jsonl"
        workload.write_trace(trace, first, count)
        words = (
            f"simulate --trace {trace} --concurrency {OUTSTANDING} --ranks {RANKS} --batch {SLOTS}"
        )
        words += f" --step-base-ms {1e3 * model[0]:.4f} --step-us-per-token {1e6 * model[1]:.4f}"
        words += f" --policy {','.join(policies)}"
        report = told_by(*words.split(), into=folder / f"{first}.json")
        for row in report["results"]:
            told[row["policy"]].append(row)
    return told


def page_of(
    found: Sequence[Run],
    told: dict[str, list[dict[str, float]]],
    model: tuple[float, float],
    command: str,
) -> str:
    """Return the page of the appendix."""
    base = fmean(one.steps.tokens_per_s for one in found if one.policy == found[0].policy)
    simulated_base = fmean(one["output_tokens_per_s"] for one in told[found[0].policy])
    headings = ["runs", "steps", "idle %", "simulated", "by processor time", "of perfect balance %"]
    headings += ["empty slots %", f"output, x {found[0].policy}", "simulated", "whole answers"]
    lines = [table_head("policy", *right(headings))]
    for policy, rows in told.items():
        own = [one for one in found if one.policy == policy]
        steps = [one.steps for one in own]
        lines.append(
            table_row(
                policy,
                len(own),
                f"{sum(len(one.loads) for one in steps):,}",
                spread([100 * one.idle for one in steps], 1),
                spread([100 * row["idle_fraction"] for row in rows], 1),
                spread([100 * one.processor_idle for one in steps], 1),
                spread([100 * one.of_perfect(*model) for one in steps], 1),
                spread([100 * one.empty for one in steps], 1),
                spread([one.tokens_per_s / base for one in steps], 2),
                spread([row["output_tokens_per_s"] / simulated_base for row in rows], 2),
                f"{sum(one.outcome.whole for one in own)}, {sum(one.outcome.wrong for one in own)} wrong",
            )
        )
    table = "\n".join(lines)
    return f"""# Tables: the balance of real engines

<!-- not run: downloads 6 GB, and runs for minutes -->

    {command}

vLLM {VLLM} on {os.cpu_count()} cores of a CPU, a mixture of experts, one prefiller and {RANKS} decode servers of one
data-parallel rank with one barrier a step, {SLOTS} slots each, KV caches by NIXL. {OUTSTANDING} requests are
outstanding: those of the Mooncake conversation trace, lengths / {SCALE}, answers' lengths unknown to the proxy. The
first {WARM_UP_S:.0f} s of a run are left out. *Idle* is the share of rank time lost at the barrier, by the engines' own
step traces. *Output* is in tokens for each second of processor time of the slower rank. *Simulated* are the same requests by
`balanceroute simulate` with the fitted T = {1e3 * model[0]:.1f} ms + {1e6 * model[1]:.2f} µs · max load. ± is the standard error
over runs.

{table}

It does not prove a gain by the wall clock: on so few cores each step also waits for the scheduler of the machine.
Prompts are cached on all engines, so prefill and the transfer of whole KV caches are not in it. Runs as short as these
flatter the output of policies that take small prompts first; *of perfect balance* is the fairer figure.
"""


def balance(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """The balance of decode ranks on real vLLM engines with one barrier, beside the simulator's.

    Installs vLLM's CPU build on the first run (6 GB). Runs each policy for some seconds before the same engines,
    and prints a page with a table. Exits 1 if an answer was wrong.
    """
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="NAME,..")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run (default: 60)")
    parser.add_argument("--repeats", type=positive, default=1, help="of all runs (default: 1)")
    parser.add_argument(
        "--skip", type=int, default=1_000, help="requests of the trace (default: 1000)"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(words)
    arguments.policies = arguments.policies.split(",")
    if not set(arguments.policies) <= set(KNOWN):
        parser.error(f"--policies: of {', '.join(KNOWN)}")
    if arguments.seconds <= 2 * WARM_UP_S:
        parser.error(f"--seconds: more than {2 * WARM_UP_S:.0f}")
    # As control-C does: the engines are groups of their own, which nobody else would end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    prepare()
    workload = Workload()
    with tempfile.TemporaryDirectory(prefix="balanceroute-balance-") as name:
        folder = Path(name)
        found = list(runs(arguments, workload, folder))
        model = fit([one.steps for one in found])
        told = simulate(found, workload, model, folder)
    command = " ".join(
        ["python scripts/checks balance", *(one for one in words if one != "--write")]
    )
    page = page_of(found, told, model, command)
    print(page)
    if arguments.write:
        PAGE.write_text(page)
    return int(any(one.outcome.wrong for one in found))
