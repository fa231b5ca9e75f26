"""Several models behind one alias, live."""

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from tests.support.soak.proxy_process import running_proxy

from balanceroute.proxy.lab.model_choice.environment import paper_scenario
from balanceroute.proxy.lab.pictures import INK, SOFT, empty_figure, write_pictures
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.messages import Headers, WireError, first_value
from balanceroute.proxy.wire.sse import EventScanner
from experiment import emulated, right, table_head, table_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TPOT_MS = 80.0
# Base of a step in ms, and what each KV token of a rank adds in us, from the smallest model.
STEPS = {"small": (16.0, 4.0), "medium": (30.0, 12.0), "large": (45.0, 25.0)}
RANKS, BATCH = 2, 64  # Of each group; slots are a rank's.
PROMPTS, OUTPUTS = (100, 400), (20, 60)  # Tokens, from and to.
COLOURS = {"small": "#7fb2d9", "medium": "#e0a458", "large": "#9c5aa6"}
RUNS = {
    "always small": "#7fb2d9",
    "always large": "#9c5aa6",
    "always medium": "#e0a458",
    "greedy": "#2f7d4f",
    "ddqn": "#c0392b",
}
RATES = (0.5, 16.0)  # Requests a second, at least and at most.
WINDOW_S = 5.0
SEED = 5
SCENARIO = paper_scenario()


@dataclass
class Answer:
    """One request: when it was sent, and what came of it."""

    sent_s: float
    task: int
    model: str = ""
    times_s: list[float] = field(default_factory=list)
    status: int = 0
    error: str = ""

    @property
    def tpot_ms(self) -> float:
        """The mean gap between its tokens."""
        gaps = len(self.times_s) - 1
        return 1e3 * (self.times_s[-1] - self.times_s[0]) / gaps if gaps > 0 else math.inf

    @property
    def kept(self) -> bool:
        return self.tpot_ms <= TPOT_MS

    @property
    def score(self) -> float:
        place = list(STEPS).index(self.model)
        return SCENARIO.scores[self.task][place] if self.kept else 0.0


class Exchange:
    """Reads one stream."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._scanner = EventScanner()
        self._loop = asyncio.get_running_loop()
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self._answer.status = status
        self._answer.model = (first_value(headers, b"x-balanceroute-model") or b"").decode()

    def on_data(self, data: bytes) -> None:
        tokens = sum(b'"text"' in event for event in self._scanner.feed(data))
        self._answer.times_s += [self._loop.time()] * tokens

    def on_end(self) -> None:
        self.over.set()

    def on_error(self, error: WireError) -> None:
        self._answer.error = str(error)
        self.over.set()


def arrivals(seconds: float) -> list[tuple[float, int, int, int]]:
    """Return time, task, prompt and output tokens of requests at a rate that rises and falls twice."""
    draw, now_s = random.Random(SEED), 0.0
    found: list[tuple[float, int, int, int]] = []
    while True:
        wave = 0.5 - 0.5 * math.cos(4 * math.pi * now_s / seconds)
        now_s += draw.expovariate(RATES[0] + (RATES[1] - RATES[0]) * wave**2)
        if now_s >= seconds:
            return found
        task = draw.randrange(len(SCENARIO.tasks))
        found.append((now_s, task, draw.randint(*PROMPTS), draw.randint(*OUTPUTS)))


async def run(port: int, alias: str, seconds: float) -> list[Answer]:
    """Send the requests to an alias."""
    loop, endpoint = asyncio.get_running_loop(), Endpoint("127.0.0.1", port)
    begin_s, answers, exchanges = loop.time(), [], []
    for at_s, task, prompt, output in arrivals(seconds):
        await asyncio.sleep(begin_s + at_s - loop.time())
        answer = Answer(at_s, task)
        exchange = Exchange(answer)
        body = {
            "model": alias,
            "prompt": list(range(1, prompt + 1)),
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
        }
        headers = [
            (b"content-type", b"application/json"),
            (b"x-task", SCENARIO.tasks[task].encode()),
        ]
        data = json.dumps(body).encode()
        endpoint.request(b"POST", b"/v1/completions", headers, data, exchange)
        answers.append(answer)
        exchanges.append(exchange)
    for exchange in exchanges:
        await exchange.over.wait()
    endpoint.close()
    return answers


def topology(fleets: dict[str, dict[str, list[str]]], weights: Path | None) -> str:
    """Return the file of the proxy."""
    lines = ['name = "models"', "[proxy]", f"batch = {BATCH}"]
    for name, urls in fleets.items():
        lines += ["[[model]]", f'name = "{name}"']
        for role, of_role in urls.items():
            tables = ", ".join(f'{{ url = "{url}" }}' for url in of_role)
            lines.append(f"{role} = [{tables}]")
    rows = zip(SCENARIO.tasks, SCENARIO.scores, strict=True)
    tasks = ", ".join(f"{task} = {list(scores)}" for task, scores in rows)
    for name in RUNS:
        kind, _, model = name.partition(" ")
        chooser = [f'chooser = "{"static" if model else kind}"']
        if model:
            chooser.append(f'static = "{model}"')
        elif kind == "ddqn":
            if weights is None:
                continue
            chooser.append(f"weights = {json.dumps(str(weights.absolute()))}")
        lines += [f"[alias.{_alias(name)}]", f"groups = {json.dumps(list(STEPS))}", *chooser]
        lines += [f"tpot_ms = {TPOT_MS}", f"tasks = {{ {tasks} }}"]
    return "\n".join([*lines, ""])


def _alias(name: str) -> str:
    return name.replace(" ", "-")


def engines_flags(name: str) -> list[str]:
    """Return the flags of one group's engines."""
    base_ms, us_per_token = STEPS[name]
    flags = {
        "model": name,
        "prefillers": 1,
        "ranks": RANKS,
        "batch": BATCH,
        "step-base-ms": base_ms,
        "step-us-per-token": us_per_token,
        "prefill-us-per-token": 50,
    }
    return [f"--{key}={value}" for key, value in flags.items()]


def scenario() -> str:
    """Return the groups as `model-router train` reads them."""
    lines = [f"tpot_ms = {TPOT_MS}", f"tasks = {json.dumps(SCENARIO.tasks)}"]
    for place, (name, (base_ms, us_per_token)) in enumerate(STEPS.items()):
        lines += ["[[group]]", f'name = "{name}"', f"ranks = {RANKS}", f"slots = {BATCH}"]
        lines += [f"step_base_ms = {base_ms}", f"step_us_per_token = {us_per_token}"]
        lines.append(f"scores = {[row[place] for row in SCENARIO.scores]}")
    return "\n".join([*lines, ""])


def train(folder: Path) -> Path:
    """Train a network on these groups and on lengths that are drawn alike; return its weights."""
    draw, weights = random.Random(SEED + 1), folder / "router.npz"
    lengths = [(draw.randint(*PROMPTS), draw.randint(*OUTPUTS)) for _ in range(2_000)]
    rows = [
        {"arrival_s": float(place), "prompt_tokens": prompt, "output_tokens": output}
        for place, (prompt, output) in enumerate(lengths)
    ]
    trace, described = folder / "lengths.jsonl", folder / "scenario.toml"
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    described.write_text(scenario())
    command = [sys.executable, "-m", "balanceroute.proxy", "model-router", "train"]
    command += [f"--scenario={described}", f"--trace={trace}", f"--out={weights}"]
    subprocess.run(command, check=True)
    return weights


def live(folder: Path, seconds: float, weights: Path | None) -> dict[str, list[Answer]]:
    """Run everything; return the answers by choice."""
    with ExitStack() as stack:
        fleets = {name: stack.enter_context(emulated(engines_flags(name))) for name in STEPS}
        path = folder / "models.toml"
        path.write_text(topology(fleets, weights))
        flags = ["--topology", str(path), "--port", "0", "--admin-port", "0"]
        proxy = stack.enter_context(running_proxy(flags, engines=[], folder=folder))
        found = {}
        for name in RUNS:
            if name != "ddqn" or weights is not None:
                print(f"{name} ..", file=sys.stderr, flush=True)
                found[name] = asyncio.run(run(proxy.port, _alias(name), seconds))
        return found


def windows(answers: Sequence[Answer], seconds: float) -> list[tuple[float, float, float]]:
    """Return the middle of each window, the share within the target, and the mean score."""
    found = []
    for place in range(math.ceil(seconds / WINDOW_S)):
        begin_s = place * WINDOW_S
        part = [one for one in answers if begin_s <= one.sent_s < begin_s + WINDOW_S]
        if part:
            kept = fmean(one.kept for one in part)
            found.append((begin_s + WINDOW_S / 2, kept, fmean(one.score for one in part)))
    return found


def draw(runs: dict[str, list[Answer]], seconds: float) -> "Figure":
    """Return the picture: the rate, the share in time, the score, and who answered."""
    title = "Three models behind one alias, at a rate that rises and falls"
    told = [
        f"Live, emulated engines; target {TPOT_MS:g} ms per output token; {WINDOW_S:g} s windows."
    ]
    shown = list(runs)[-1]
    figure = empty_figure(8.2, 8.0, title, told)
    rate, kept, score, mix = figure.subplots(4, 1, sharex=True)
    counts = Counter(int(one.sent_s // WINDOW_S) for one in next(iter(runs.values())))
    middles = [WINDOW_S * (place + 0.5) for place in sorted(counts)]
    rate.bar(
        middles,
        [counts[place] / WINDOW_S for place in sorted(counts)],
        width=0.9 * WINDOW_S,
        color="#b4b9c0",
    )
    rate.set_ylabel("requests/s")
    for name, answers in runs.items():
        rows = windows(answers, seconds)
        for axes, column in ((kept, 1), (score, 2)):
            axes.plot(
                [row[0] for row in rows],
                [row[column] for row in rows],
                color=RUNS[name],
                label=name,
                marker="o",
                markersize=3,
            )
    kept.set_ylabel("within the target")
    score.set_ylabel("mean score")
    for axes in (kept, score):
        axes.set_ylim(-0.03, 1.03)
    rate.legend(*kept.get_legend_handles_labels(), frameon=False, ncols=len(runs), loc="upper left")
    rate.set_ylim(0, 1.35 * RATES[1])
    below = [0.0] * len(middles)
    for model, colour in COLOURS.items():
        parts = []
        for place in sorted(counts):
            chosen = [one.model for one in runs[shown] if int(one.sent_s // WINDOW_S) == place]
            parts.append(chosen.count(model) / max(1, len(chosen)))
        mix.bar(middles, parts, bottom=below, width=0.9 * WINDOW_S, color=colour, label=model)
        below = [one + more for one, more in zip(below, parts, strict=True)]
    mix.set_ylabel(f"who answers ({shown})")
    mix.set_ylim(0, 1.25)
    mix.set_yticks([0, 0.5, 1])
    mix.legend(frameon=False, ncols=3, loc="upper left", labelcolor=INK)
    mix.set_xlabel("seconds", color=SOFT)
    return figure


def table(runs: dict[str, list[Answer]]) -> str:
    """Return the figures of each choice."""
    names = ("sent", "failed", "in time %", "score", *(f"{model} %" for model in STEPS))
    lines = [table_head("choice", *right(names))]
    for name, answers in runs.items():
        served = [one for one in answers if one.model]
        models = Counter(one.model for one in served)
        kept = f"{100 * fmean(one.kept for one in served):.1f}"
        score = f"{fmean(one.score for one in served):.3f}"
        shares = (f"{100 * models[model] / len(served):.0f}" for model in STEPS)
        lines.append(table_row(name, len(answers), failures(answers), kept, score, *shares))
    return "\n".join(lines)


def failures(answers: Sequence[Answer]) -> int:
    """Return how many requests were not answered."""
    return sum(one.status != 200 or bool(one.error) for one in answers)


def model_alias(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Three models behind one alias, live, at a rate that rises and falls: who answers, and in time or not.

    Starts three groups of emulated engines of different speed and one proxy before them, each a process
    with real sockets, and sends the same requests to several aliases of the same groups, one after another:
    always one model, for each of them, greedy, and ddqn if weights are given. With --train it trains them
    first, by `balanceroute model-router train`, on these groups and lengths. Prints for each choice the
    share of the answers within the target and their mean score (0 if late), and draws both over time. Exits
    1 if a request failed.
    """
    parser.add_argument("--out", type=Path, default=Path("build/models"), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    learned = parser.add_mutually_exclusive_group()
    learned.add_argument(
        "--weights", type=Path, help="of `model-router train`, for a run with ddqn"
    )
    learned.add_argument("--train", action="store_true", help="train them for these groups first")
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    weights = train(arguments.out) if arguments.train else arguments.weights
    runs = live(arguments.out, arguments.seconds, weights)
    print(table(runs))
    files = write_pictures({"alias": lambda: draw(runs, arguments.seconds)}, arguments.out)
    print(*files, sep="\n")
    return 1 if any(map(failures, runs.values())) else 0
