"""The balance of decode ranks on real vLLM engines with one barrier, beside the simulator's.

One prefiller and decode servers of a data-parallel group run a mixture of experts in which attention over the
KV cache is nearly all of a step. Requests are those of the Mooncake conversation trace, their lengths divided
by 4; the length of an answer is hidden from the proxy (`stop_after`, see cpu_shim). A prompt is one of 12 whose
blocks all engines have cached, so prefill and transfer cost little, and decode is what is measured.

Processor time is that of the computing thread: waiting at the barrier or for a core costs none. Other programs' use
of caches and cores still makes a step longer.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tests.support.arguments import positive

from balanceroute.proxy.lab.pictures import INK, SOFT, empty_figure, write_pictures
from balanceroute.proxy.lab.validate.traces import read_traces, timeline_of
from balanceroute.traces import TraceRequest, write_native
from bench.targets import KNOWN as ROUTERS
from bench.targets import started
from checks.fleet import (
    VLLM,
    Engine,
    Fleet,
    Order,
    free_port,
    json_of,
    nixl_order,
    prepare,
    running,
)
from experiment import MOONCAKE, ROOT, requests_of, right, table_head, table_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS, SLOTS, OUTSTANDING = 2, 8, 48
SCALE, PROMPTS, BLOCK, LONGEST = 4, 12, 32, 12_000
LIMIT, CONTEXT = 512, 12_288
VOCABULARY = 2_048
LEASE_S = 120
WARM_UP_S = 8.0
_ANSWER_S = 600.0
POLICIES = ("jsq", "br-h")
OTHER = ROUTERS["vllm-router"]
# The rules of vllm-router that are compared; the simulator has policies of the same names.
RULES = {OTHER.name: "round_robin", f"{OTHER.name}-power-of-two": "power_of_two"}
KNOWN = ("jsq", "round-robin", "least-kv", "br-0", "br-h", *RULES)
PAGE = ROOT / "docs" / "appendix" / "real_balance.md"
PICTURES = ROOT / "docs" / "img"
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

    sent: int = 0
    tokens: int = 0  # Of the answers to those.
    whole: int = 0  # Answers with the tokens that they should have.
    wrong: int = 0  # Other answers, but those that the end of the run cut off.


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
    outcome, source = Outcome(), itertools.islice(workload.requests, first, None)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_ANSWER_S, limits=limits, trust_env=False) as client:

        async def one_after_another() -> None:
            for one in source:
                outcome.sent, outcome.tokens = outcome.sent + 1, outcome.tokens + one.tokens
                whole = await ask(client, url, workload.prompts[one.prompt], one.tokens)
                outcome.whole, outcome.wrong = outcome.whole + whole, outcome.wrong + (not whole)

        tasks = [asyncio.create_task(one_after_another()) for _ in range(OUTSTANDING)]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        # Answers that come while they are cancelled do not count.
        unchanged = replace(outcome)
        await asyncio.gather(*tasks, return_exceptions=True)
    return unchanged


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
    """The steps that all ranks of the barrier took in a run; each column is float64[steps, ranks]."""

    loads: NDArray[np.float64]  # KV tokens.
    batch: NDArray[np.float64]  # Requests.
    processor_s: NDArray[np.float64]  # Of the thread that computes.
    wall_s: NDArray[np.float64]  # From the end of the step before.

    @property
    def idle(self) -> float:
        """The share of rank time that is lost at the barrier, by loads."""
        return _lost(self.loads)

    @property
    def processor_idle(self) -> float:
        """The same by processor time."""
        return _lost(self.processor_s)

    @property
    def empty(self) -> float:
        """The share of slots without a request."""
        return float(1.0 - self.batch.mean() / SLOTS)

    def tokens_per_s(self, times: NDArray[np.float64]) -> float:
        """Tokens of all ranks in a second of the slower one's times, which are those of a column."""
        return float(self.batch.sum() / times.max(axis=1).sum())

    def of_perfect(self, line: "Line") -> float:
        """The share of the output that the same batches had with perfect balance, at T = a + b max L."""
        means, largest = self.loads.mean(axis=1), self.loads.max(axis=1)
        perfect = (line.base_s + line.token_s * means).sum()
        return float(perfect / (line.base_s + line.token_s * largest).sum())


def _lost(column: NDArray[np.float64]) -> float:
    return float(1.0 - column.mean(axis=1).sum() / column.max(axis=1).sum())


def steps_of(folder: Path, begin_ns: int, end_ns: int) -> Steps:
    """Return the steps within a span of time, which every rank has recorded."""
    columns: list[dict[int, tuple[float, ...]]] = []
    for trace in read_traces(folder):
        times = np.fromfile(folder / f"{trace.header['dp_rank']}.times", dtype=_TIMES)
        places = (times["wave"].astype(np.int64) << 32) + times["step"]
        processor: dict[int, int] = dict(zip(places.tolist(), times["ns"].tolist(), strict=True))
        line, order = timeline_of(trace), np.argsort(trace.steps["end_ns"], kind="stable")
        batch = trace.steps["batch"][order]
        within = (line.end_ns > begin_ns) & (line.end_ns < end_ns)
        own = (line.place, line.kv_tokens, batch, line.cycle_ns / 1e9)
        columns.append(
            {
                place: (load, size, processor[place] / 1e9, wall_s)
                for place, load, size, wall_s in zip(*(one[within] for one in own), strict=True)
                if place in processor
            }
        )
    common = sorted(set.intersection(*(set(column) for column in columns)))
    table = np.array([[column[place] for column in columns] for place in common], np.float64)
    return Steps(*np.moveaxis(table, -1, 0))


@dataclass(frozen=True)
class Line:
    """T = a + b max L, fitted by least squares."""

    base_s: float  # a.
    token_s: float  # b.
    explained: float  # R².


def fitted(loads: NDArray[np.float64], times: NDArray[np.float64]) -> Line:
    """Fit the slower rank's times to the largest loads; both are columns of steps."""
    largest, slowest = loads.max(axis=1), times.max(axis=1)
    slope, base = np.polyfit(largest, slowest, 1)
    rest = slowest - (base + slope * largest)
    return Line(float(base), float(slope), float(1.0 - rest.var() / slowest.var()))


# The experiment.


@dataclass(frozen=True)
class Run:
    """One policy before the engines for a while."""

    policy: str
    first: int  # The first request of the trace that was sent.
    outcome: Outcome
    steps: Steps


def refill_steps(run: Run) -> float:
    """Return for how many steps a slot that an answer freed had no request, in the mean."""
    empty = run.steps.empty
    return empty / (1.0 - empty) * run.outcome.tokens / run.outcome.sent


def add_run(file: Path, run: Run) -> None:
    """Append a run to a file of JSON lines."""
    steps = {one.name: getattr(run.steps, one.name).tolist() for one in fields(run.steps)}
    line = {"policy": run.policy, "first": run.first, "outcome": asdict(run.outcome)}
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line | {"steps": steps}) + "\n")


def read_runs(file: Path) -> list[Run]:
    """Return the runs that a file has; none if it is not there.

    Raises:
        SystemExit: A line is no run.
    """
    found = []
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, text in enumerate(lines, start=1):
        try:
            line: dict[str, Any] = json.loads(text)
            columns = {name: np.array(column) for name, column in line["steps"].items()}
            outcome, steps = Outcome(**line["outcome"]), Steps(**columns)
            found.append(Run(line["policy"], int(line["first"]), outcome, steps))
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"{file}:{number}: no run of this check: {error!r}") from None
    return found


def orders(steps: Path) -> list[Order]:
    """Return how to start the engines."""
    common = [f"--max-model-len={CONTEXT}", "--num-gpu-blocks-override=2200"]
    common += [f"--max-num-batched-tokens={CONTEXT}", "--enable-prompt-tokens-details"]
    group = [f"--max-num-seqs={SLOTS}", f"--data-parallel-size={RANKS}"]
    group += [f"--data-parallel-rpc-port={free_port()}", "--data-parallel-address=127.0.0.1"]
    order = partial(nixl_order, model="attention-moe", lease_s=LEASE_S)
    shim = "nixl,fork,hidden-lengths"
    return [
        order("prefill-0", role="kv_producer", flags=[*common, "--max-num-seqs=64"], shim=shim),
        *(
            order(
                f"decode-{i}",
                role="kv_consumer",
                flags=[*common, *group, f"--data-parallel-rank={i}"],
                shim=f"{shim},moe-dp,thread-times",
                variables={"BALANCEROUTE_STEP_TRACE": str(steps)},
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


@contextmanager
def before(fleet: Fleet, policy: str, turn: int) -> Iterator[str]:
    """Run this proxy, or vllm-router, before the engines; yield its URL."""
    name = f"{policy} {turn}"
    if policy in RULES:
        command = OTHER.command.replace(RULES[OTHER.name], RULES[policy])
        prefill, decode = ([one.url for one in ones] for ones in (fleet.prefillers, fleet.decoders))
        log = fleet.folder / f"{name}.log"
        with started(replace(OTHER, command=command), prefill, decode, log, "tiny") as target:
            yield f"http://127.0.0.1:{target.port}"
        return
    flags = ("--policy", policy, "--batch", str(SLOTS), "--lease-s", str(LEASE_S))
    with fleet.proxy(name, *flags) as proxy:
        yield proxy.url


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
                with before(fleet, policy, turn) as url:
                    begin_ns = time.time_ns()
                    outcome = asyncio.run(closed_loop(url, workload, first, arguments.seconds))
                    end_ns = begin_ns + int(arguments.seconds * 1e9)
                time.sleep(1.5)  # The traces are written once a second.
                found = steps_of(steps, begin_ns + int(WARM_UP_S * 1e9), end_ns)
                print(
                    f"{policy}: {outcome.whole} whole, {outcome.wrong} wrong, {len(found.loads)} steps, "
                    f"idle {found.idle:.1%}, empty slots {found.empty:.1%}",
                    flush=True,
                )
                yield Run(policy, first, outcome, found)


def simulate(
    found: Sequence[Run], workload: Workload, line: Line, folder: Path
) -> dict[str, list[dict[str, float]]]:
    """Return the simulator's figures of each policy, for the requests of its runs."""
    by_policy: dict[str, list[dict[str, float]]] = {one.policy: [] for one in found}
    for first in sorted({one.first for one in found}):
        sent = {one.policy: one.outcome.sent for one in found if one.first == first}
        names = {policy: RULES.get(policy, policy).replace("_", "-") for policy in sent}
        trace = folder / f"{first}.jsonl"
        workload.write_trace(trace, first, int(median(sent.values())))
        words = f"simulate --trace {trace} --concurrency {OUTSTANDING} --ranks {RANKS}"
        words += f" --batch {SLOTS} --step-base-ms {1e3 * line.base_s:.4f}"
        words += f" --step-us-per-token {1e6 * line.token_s:.4f}"
        words += f" --policy {','.join(sorted(set(names.values())))}"
        report = json_of(*words.split(), into=folder / f"{first}.json")
        rows = {row["policy"]: row for row in report["results"]}
        for policy, name in names.items():
            by_policy[policy].append({"first": first} | rows[name])
    return by_policy


# The page.


def middle(values: Sequence[float], digits: int) -> str:
    """Return a median, and the least and the most if there are several."""
    if len(values) < 2:
        return "".join(f"{one:.{digits}f}" for one in values) or "-"
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{median(values):.{digits}f} ({least} to {most})"


def table_of(found: Sequence[Run], by_policy: dict[str, list[dict[str, float]]], line: Line) -> str:
    """Return the table of the policies; outputs are relative to the first one's with the same requests."""
    headings = ["runs", "steps", "idle %", "simulated", "by processor time", "of perfect balance %"]
    headings += ["empty slots %", "steps until refilled"]
    headings += [f"output, x {found[0].policy}", "simulated", "by the clock"]
    lines = [table_head("policy", *right([*headings, "whole answers"]))]
    bases = {one.first: one.steps for one in found if one.policy == found[0].policy}
    simulated = {
        int(row["first"]): row["output_tokens_per_s"] for row in by_policy[found[0].policy]
    }
    for policy, rows in by_policy.items():
        own = [one for one in found if one.policy == policy]
        steps = [one.steps for one in own]
        pairs = [(one.steps, bases[one.first]) for one in own if one.first in bases]

        def gains(name: str, pairs: Sequence[tuple[Steps, Steps]] = pairs) -> list[float]:
            made = [[one.tokens_per_s(getattr(one, name)) for one in pair] for pair in pairs]
            return [ours / theirs for ours, theirs in made]

        shares = (
            [one.idle for one in steps],
            [row["idle_fraction"] for row in rows],
            [one.processor_idle for one in steps],
            [one.of_perfect(line) for one in steps],
            [one.empty for one in steps],
        )
        bound = [row for row in rows if row["first"] in simulated]
        outputs = [row["output_tokens_per_s"] / simulated[int(row["first"])] for row in bound]
        lines.append(
            table_row(
                policy,
                len(own),
                f"{sum(len(one.loads) for one in steps):,}",
                *(middle([100 * one for one in share], 1) for share in shares),
                middle([refill_steps(one) for one in own], 1),
                *(middle(one, 2) for one in (gains("processor_s"), outputs, gains("wall_s"))),
                f"{sum(one.outcome.whole for one in own)}, {sum(one.outcome.wrong for one in own)} wrong",
            )
        )
    return "\n".join(lines)


def fits_of(found: Sequence[Run]) -> tuple[Line, str]:
    """Return the line by processor time, and a table of the lines by it and by the clock."""
    lines = [table_head("time of a step", *right(["a ms", "b µs", "R²", "R² of single runs"]))]
    loads = np.concatenate([one.steps.loads for one in found])
    by = {"processor time": "processor_s", "by the clock": "wall_s"}
    fits = {
        title: fitted(loads, np.concatenate([getattr(one.steps, name) for one in found]))
        for title, name in by.items()
    }
    for title, line in fits.items():
        single = [fitted(one.steps.loads, getattr(one.steps, by[title])).explained for one in found]
        fit = (f"{1e3 * line.base_s:.1f}", f"{1e6 * line.token_s:.2f}", f"{line.explained:.2f}")
        lines.append(table_row(title, *fit, middle(single, 2)))
    return fits["processor time"], "\n".join(lines)


def draw(found: Sequence[Run], by_policy: dict[str, list[dict[str, float]]]) -> "Figure":
    """Return the picture of the idle shares: each run, their median, and what is simulated."""
    about = ["Each dot is a run on real vLLM engines, a bar the median, a cross what is simulated."]
    figure = empty_figure(7.0, 0.8 + 0.38 * len(by_policy), "Rank time lost at the barrier", about)
    axes = figure.subplots()
    for place, (policy, rows) in enumerate(by_policy.items()):
        idle = [100 * one.steps.idle for one in found if one.policy == policy]
        axes.barh(place, median(idle), height=0.62, color="#b4b9c0")
        axes.plot(idle, [place] * len(idle), "o", color=INK, markersize=3)
        simulated = median(100 * row["idle_fraction"] for row in rows)
        axes.plot(simulated, place, "x", color="#c0392b", markersize=8, markeredgewidth=2)
    axes.set_yticks(range(len(by_policy)), list(by_policy))
    axes.invert_yaxis()
    axes.set_xlim(0)
    axes.set_xlabel("idle %", color=SOFT)
    return figure


def page_of(
    found: Sequence[Run],
    by_policy: dict[str, list[dict[str, float]]],
    line: Line,
    fits: str,
    command: str,
) -> str:
    """Return the page of the appendix."""
    return f"""# Tables: the balance of real engines

<!-- not run: downloads 6 GB, and runs for minutes -->

    {command}

vLLM {VLLM} on {os.cpu_count()} cores of a CPU, a mixture of experts, one prefiller and {RANKS} decode servers of one
data-parallel rank with one barrier a step, {SLOTS} slots each, KV caches by NIXL. {OUTSTANDING} requests are
outstanding: those of the Mooncake conversation trace, lengths / {SCALE}, answers' lengths unknown to the proxy. The
first {WARM_UP_S:.0f} s of a run are left out. *Idle* is the share of rank time lost at the barrier, by the engines' own
step traces. *Output* is in tokens for each second of processor time of the slower rank, and *by the clock* for each
second. *Simulated* are the same requests by `balanceroute simulate` with the fitted processor time. vllm-router
{OTHER.package.rpartition("=")[2]} runs in PD mode with `round_robin` or the rule in its name, and holds nothing back;
simulated is that rule. Figures are medians over runs, with the least and the most.

{table_of(found, by_policy, line)}

![Idle shares of the policies, measured and simulated](../img/real_balance.png)

T = a + b · max load over all steps of all runs, and by single runs:

{fits}

A policy that holds requests back refills a slot when its answer has ended: that is told during one step, and vLLM asks
for a KV cache only where a slot is free, during the next. So the share of empty slots falls as answers grow; here they
have {fmean(one.outcome.tokens / one.outcome.sent for one in found):.0f} tokens in the mean. Policies that bind at once have the next request's cache in the engine.

By the clock a step also waits for the scheduler of a machine with so few cores, at the barrier and elsewhere: what it
explains is less, and a gain by the clock here is no proof. Prompts are cached on all engines, so prefill and the
transfer of whole KV caches are not in it. Runs as short as these flatter the output of policies that take small
prompts first; *of perfect balance* is the fairer figure.
"""


def balance(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """The balance of decode ranks on real vLLM engines with one barrier, beside the simulator's.

    Installs vLLM's CPU build on the first run (6 GB). Runs each policy for some seconds before the same engines,
    and prints a page with a table. With --add the runs of several calls, each with another --skip, are one table.
    Exits 1 if an answer was wrong.
    """
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="NAME,..")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run (default: 60)")
    parser.add_argument("--repeats", type=positive, default=1, help="of all runs (default: 1)")
    parser.add_argument(
        "--skip", type=int, default=1_000, help="requests of the trace (default: 1000)"
    )
    parser.add_argument(
        "--add",
        type=Path,
        metavar="FILE",
        help="JSON lines that get the runs, and tell former ones",
    )
    parser.add_argument("--no-runs", action="store_true", help="only the page of --add's runs")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(words)
    arguments.policies = arguments.policies.split(",")
    if not set(arguments.policies) <= set(KNOWN):
        parser.error(f"--policies: of {', '.join(KNOWN)}")
    if arguments.seconds <= 2 * WARM_UP_S:
        parser.error(f"--seconds: more than {2 * WARM_UP_S:.0f}")
    found = read_runs(arguments.add) if arguments.add else []
    if arguments.no_runs and not found:
        parser.error("--no-runs needs --add with a file that has runs")
    workload = Workload()
    with tempfile.TemporaryDirectory(prefix="balanceroute-balance-") as name:
        folder = Path(name)
        if not arguments.no_runs:
            prepare()
            for run in runs(arguments, workload, folder):
                found.append(run)
                if arguments.add:
                    add_run(arguments.add, run)
        found.sort(key=lambda one: KNOWN.index(one.policy))
        line, fits = fits_of(found)
        by_policy = simulate(found, workload, line, folder)
    asked = [one for one in words if one not in ("--write", "--no-runs")]
    command = " ".join(["python scripts/checks balance", *asked])
    page = page_of(found, by_policy, line, fits, command)
    print(page)
    if arguments.write:
        PAGE.write_text(page)
        write_pictures({PAGE.stem: lambda: draw(found, by_policy)}, PICTURES)
    return int(any(one.outcome.wrong for one in found))
