"""What predictors of output lengths are worth: to BR-H in the simulator, and by themselves."""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import floor, log2
from pathlib import Path
from statistics import NormalDist, median
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from tests.support.arguments import positive

from balanceroute.predictors import Predictor, RequestFeatures
from balanceroute.predictors.evaluation import Replay, cut_in_time, judge
from balanceroute.predictors.kinds import KINDS, train
from balanceroute.predictors.past import past_requests
from balanceroute.predictors.survival import LimitHabits
from balanceroute.proxy.cli.judgement_report import as_json, gain_cell, number_cell
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.policies import POLICIES, PolicySettings
from balanceroute.proxy.core.projection import Form
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import FORECASTS, Forecast, run_experiment
from balanceroute.proxy.lab.sim.workload import Workload, split
from balanceroute.traces import TraceRequest, read_trace
from experiment import (
    AZURE_CODE,
    AZURE_CONV,
    MOONCAKE,
    PUBLIC,
    SERVEGEN,
    requests_of,
    right,
    spread,
    table_head,
    table_row,
)

SEGMENTS = 6
KNOWN = 2000  # Requests at the beginning, from which the first segment's predictor has learned.
BATCH = 16
TEMPLATES = 400
RECURRING = 8000
LIMITED = 11_000
BOUNDS = "bounds"
# How likely a normal deviate is larger.
_DEVIATIONS = np.linspace(-8.0, 8.0, 3201)
_LONGER = np.array([NormalDist().cdf(-deviation) for deviation in _DEVIATIONS.tolist()])
FIGURES = ("idle_fraction", "output_tokens_per_s", "tpot_ms_p95", "pool_wait_s_p99")


@dataclass(frozen=True)
class Scenario:
    """One table."""

    name: str  # What it is called.
    requests: Callable[[], list[TraceRequest]]  # Makes the trace.
    ranks: int = 8  # G.
    backlog: int | None = 64  # Requests that always wait; None for an open loop.
    rate: float | None = None  # Of the open loop.
    # Makes what predictors have learned from instead of the trace's own past.
    learned: Callable[[], list[TraceRequest]] | None = None
    # Which of `FORECASTS`, `forecasts` or `BOUNDS` are compared, or policies without one, beside
    # BR-0.
    predictors: tuple[str, ...] = (*KINDS, "oracle", "none")
    form: Form | None = None  # How BR-H projects.
    # Predictors of this scenario alone.
    forecasts: dict[str, Forecast] = field(default_factory=dict)

    def workloads(self) -> list[Workload]:
        known = 0 if self.learned is not None else KNOWN
        cut = split(
            self.requests(), segments=SEGMENTS, rate=self.rate, backlog=self.backlog, known=known
        )
        if self.learned is None:
            return cut
        history = self.learned()
        return [replace(workload, history=history) for workload in cut]


def drawn_templates(name: str, seed: str) -> tuple[random.Random, list[TraceRequest]]:
    """Return templates of a trace, and the generator that has drawn them."""
    rng = random.Random(seed)
    return rng, rng.sample(requests_of(PUBLIC / name), TEMPLATES)


def recurring(
    name: str = "mooncake_conversation.jsonl.gz", seed: str = "recurring", spread: float = 0.1
) -> list[TraceRequest]:
    """Return requests made of templates; see `predictors`."""
    rng, templates = drawn_templates(name, seed)
    weights = list(accumulate(1 / (place + 1) for place in range(TEMPLATES)))
    places = rng.choices(range(TEMPLATES), cum_weights=weights, k=RECURRING)
    return [
        TraceRequest(
            number * 300_000_000,
            templates[place].prompt_tokens,
            max(1, round(templates[place].output_tokens * rng.lognormvariate(0.0, spread))),
            # One block that no other template has: the whole prompt recurs, or nothing of it.
            (place,),
        )
        for number, place in enumerate(places)
    ]


class KnownTasks:
    """Knows what each request's task emits on average, and how its answers are spread.

    Args:
        medians: float64[n], by request, in tokens.
        spread: Standard deviation of the logarithm of an answer.
    """

    def __init__(self, medians: NDArray[np.float64], spread: float) -> None:
        self._medians = medians
        self._spread = spread

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note nothing."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the survival of a log-normal output that is rounded to tokens."""
        least = np.add.outer(ages, np.arange(steps + 1)) + 0.5
        deviations = np.log(least / self._medians[requests][:, None]) / self._spread
        longer = np.interp(deviations, _DEVIATIONS, _LONGER)
        return np.asarray(longer / longer[:, :1])

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn nothing."""

    def forget(self, request: RequestId) -> None:
        """Nothing was noted."""


def known_tasks(name: str, seed: str, spread: float) -> Forecast:
    """Return what makes the predictor of one run of `recurring` requests."""

    def forecast(workload: Workload, _: PolicySettings) -> Predictor:
        templates = drawn_templates(name, seed)[1]
        places = [request.hash_ids[0] for request in workload.requests]
        outputs = [templates[place].output_tokens for place in places]
        return KnownTasks(np.array(outputs, np.float64), spread)

    return forecast


def limited(limit_of: Callable[[list[int]], int]) -> list[TraceRequest]:
    """Return the ServeGen trace cut at limits, one for each client, given the lengths of its answers."""
    requests = requests_of(SERVEGEN)
    answers: dict[tuple[int, ...], list[int]] = {}
    for request in requests:
        answers.setdefault(request.hash_ids, []).append(request.output_tokens)
    limits = {client: limit_of(lengths) for client, lengths in answers.items()}
    return [
        replace(
            request,
            output_tokens=min(request.output_tokens, limits[request.hash_ids]),
            max_tokens=limits[request.hash_ids],
        )
        for request in requests[:LIMITED]
    ]


def budgets() -> list[TraceRequest]:
    """Return requests whose limits are budgets; see `predictors`."""
    return limited(lambda lengths: 2 ** floor(log2(median(lengths))))


def drawn_limits() -> list[TraceRequest]:
    """Return requests whose limits were drawn; see `predictors`."""
    rng = random.Random("limits")
    return limited(lambda _: rng.choice((512, 1024, 2048, 4096)))


def drifting() -> list[TraceRequest]:
    """Return the Mooncake trace with outputs that grow sixteenfold."""
    requests = requests_of(MOONCAKE)
    return [
        replace(
            request,
            output_tokens=max(
                1, round(request.output_tokens * 4 ** (2 * number / len(requests) - 1))
            ),
        )
        for number, request in enumerate(requests)
    ]


_MOONCAKE, _AZURE_CONV, _AZURE_CODE = (
    partial(requests_of, trace) for trace in (MOONCAKE, AZURE_CONV, AZURE_CODE)
)
_TASKS = ("servegen_reasoning.jsonl.gz", "rec")
_KNOWN_TASKS = "tasks"
_LONG = ("fifo", "survival", "exact-match", "gbdt", _KNOWN_TASKS, "oracle")
_LIMITS = ("fifo", BOUNDS, "survival", "oracle")
_BOTH = ("survival", "exact-match", "gbdt", "oracle")
SCENARIOS = (
    Scenario("mooncake, 8 ranks, saturated", _MOONCAKE),
    Scenario("mooncake, 16 ranks, saturated", _MOONCAKE, ranks=16, backlog=128),
    Scenario("mooncake, 8 ranks, rate 1.3", _MOONCAKE, backlog=None, rate=1.3),
    Scenario("mooncake, 16 ranks, rate 2.6", _MOONCAKE, ranks=16, backlog=None, rate=2.6),
    Scenario("azure conversation, 8 ranks, saturated", _AZURE_CONV),
    Scenario("azure code, 8 ranks, saturated", _AZURE_CODE),
    Scenario("recurring prompts, 8 ranks, saturated", recurring),
    Scenario("drifting lengths, 8 ranks, saturated", drifting),
    Scenario("wrong model, 8 ranks, saturated", _MOONCAKE, learned=_AZURE_CODE),
    *(
        Scenario(
            f"recurring reasoning tasks, {spread:.0%}".replace("%", " %"),
            partial(recurring, *_TASKS, spread=spread),
            predictors=_LONG,
            forecasts={_KNOWN_TASKS: known_tasks(*_TASKS, spread)},
        )
        for spread in (0.3, 0.1)
    ),
    Scenario("limits of clients, as budgets", budgets, predictors=_LIMITS),
    Scenario("limits of clients, by chance", drawn_limits, predictors=_LIMITS),
    Scenario(
        "point projection, mooncake, 8 ranks, saturated",
        _MOONCAKE,
        predictors=_BOTH,
        form=Form.POINT,
    ),
    Scenario(
        "point projection, azure conversation, 8 ranks, saturated",
        _AZURE_CONV,
        predictors=_BOTH,
        form=Form.POINT,
    ),
    Scenario(
        "point projection, recurring prompts, 8 ranks, saturated",
        recurring,
        predictors=_BOTH,
        form=Form.POINT,
    ),
)


def run(scenario: int, predictor: str, segment: int) -> dict[str, float]:
    """Simulate one segment; return its figures. A policy for `predictor` runs without one."""
    chosen = SCENARIOS[scenario]
    settings = PolicySettings(form=chosen.form)
    alone = predictor in POLICIES
    policy = predictor if alone else "br-h"
    bounds = predictor == BOUNDS
    forecasts = FORECASTS | chosen.forecasts
    forecast = forecasts["none" if alone else "survival" if bounds else predictor]
    is_habit = (lambda *_: False) if bounds else LimitHabits.is_habit
    with patch.object(LimitHabits, "is_habit", is_habit):
        (result,) = run_experiment(
            SimulatedDeployment(ranks=chosen.ranks, batch_limit=BATCH),
            [chosen.workloads()[segment]],
            [policy],
            settings,
            forecast,
        )
    return {name: result.mean[name] for name in FIGURES}


def report(scenario: Scenario, figures: dict[str, list[dict[str, float]]]) -> None:
    """Print one scenario's table."""
    print(f"\n{scenario.name}, batch {BATCH}\n")
    names = ("idle %", "x oracle", "x br-0", "tokens/s", "x br-0", "TPOT p95", "wait p99")
    print(table_head("BR-H with", *right(names)))
    for predictor, runs in figures.items():
        cells = (
            spread([100 * one["idle_fraction"] for one in runs], 1),
            _ratio(runs, figures.get("oracle"), "idle_fraction"),
            _ratio(runs, figures["br-0"], "idle_fraction"),
            spread([one["output_tokens_per_s"] for one in runs], 0),
            _ratio(runs, figures["br-0"], "output_tokens_per_s"),
            spread([one["tpot_ms_p95"] for one in runs], 1),
            spread([one["pool_wait_s_p99"] for one in runs], 1),
        )
        print(
            table_row(f"({predictor})" if predictor in POLICIES else predictor, *cells), flush=True
        )


def _ratio(
    runs: Sequence[dict[str, float]], base: Sequence[dict[str, float]] | None, name: str
) -> str:
    """Return the mean ratio within a segment, with its standard error."""
    if base is None or runs is base:
        return ""
    return spread([one[name] / other[name] for one, other in zip(runs, base, strict=True)], 3)


def predictors(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """What each predictor is worth to BR-H, end to end in the simulator: every table of docs/appendix/predictors.md.

    Every run's predictor has learned from the requests before its segment and learns on from those that
    finish; gbdt is trained anew for each segment. Segments are disjoint in time from what was learned.

    Workloads beside the public traces are made from them:

    * recurring: 400 requests of the Mooncake trace are templates; each of 8,000 requests is one of them,
      drawn with Zipf's weights (1 / place), and its output is the template's, times a log-normal factor of
      10 %. So prompts recur as in templated traffic, and the lengths are real.
    * recurring reasoning tasks: the same of the ServeGen trace, with a factor of 30 % (as when a task is
      rolled out several times), and of 10 %. "tasks" knows the template's output and the factor's
      distribution: no predictor that learns the tasks from their answers can know more.
    * limits of clients: 11,000 requests of the ServeGen trace, whose clients set `max_tokens`, and whose answers are cut there. No
      trace records limits, so these are assumed. As budgets: the power of two below the median of the client's
      answers, so that at least half of them reach it. By chance: 512, 1,024, 2,048 or 4,096 for each client.
      "bounds" is survival with limits as bounds alone, whether they are habitually reached or not.
    * drifting: the Mooncake trace, its outputs scaled by a factor that grows from 1/4 to 4 over the trace.
    * wrong: the Mooncake trace, with predictors that have learned from the Azure code trace instead (mean
      output 28 tokens, against 343).
    """
    parser.add_argument("--only", default="", metavar="WORDS", help="scenarios with these words")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="processes")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every segment's figures")
    arguments = parser.parse_args(words)
    chosen = [i for i, one in enumerate(SCENARIOS) if arguments.only in one.name]
    if not chosen:
        parser.error(f"--only: of {'; '.join(one.name for one in SCENARIOS)}")
    everything: dict[str, dict[str, list[dict[str, float]]]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        pending = {
            i: {
                predictor: pool.map(partial(run, i, predictor), range(SEGMENTS))
                for predictor in (*SCENARIOS[i].predictors, "br-0")
            }
            for i in chosen
        }
        for i, predictors in pending.items():
            figures = {predictor: list(runs) for predictor, runs in predictors.items()}
            report(SCENARIOS[i], figures)
            everything[SCENARIOS[i].name] = figures
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
    return 0


JUDGED = (AZURE_CONV, AZURE_CODE, MOONCAKE)
BASELINE = "survival"
# Of a row behind trace and predictor: scores, and by how much they are better than the baseline's. Digits.
SCORES = {"auc": 3, "brier": 4, "ece": 3, "mae": 2}
GAINED = {"auc": 4, "brier": 4, "mae": 2}
COLUMNS = (
    *("trace", "predictor", "AUC:", "Brier:", "calibration error:", "MAE tokens:"),
    *(f"{name} better than {BASELINE} by:" for name in ("AUC", "Brier", "MAE")),
)


def judged(
    trace: Path, kinds: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train the kinds on the first half of a trace and print how good they are; return rows of JSON's types."""
    horizon: int = arguments.horizon
    cut = cut_in_time(past_requests(read_trace(trace)[: arguments.requests]), 0.5)
    replay = Replay(cut.after, horizon_steps=horizon, from_s=cut.at_s)
    trained = {kind: train(kind, cut.before, horizon_steps=horizon) for kind in kinds}
    judgements = judge(replay, trained, baseline=BASELINE, learn=not arguments.frozen)
    for kind, judgement in judgements.items():
        cells = [number_cell(getattr(judgement.scores, name), n) for name, n in SCORES.items()]
        gains = (
            "" if kind == BASELINE else gain_cell(judgement.gains[name], n)
            for name, n in GAINED.items()
        )
        print(table_row(f"`{trace.name}`", f"`{kind}`", *cells, *gains), flush=True)
    sizes = {"train_requests": len(cut.before), "judged_requests": len(cut.after)}
    rows = as_json(replay.rows, judgements, baseline=BASELINE)
    return [{"trace": trace.name} | sizes | row for row in rows]


def predictor_table(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Judge each kind of predictor on each public trace: the counterpart of the paper's Table 3.

    Each is trained on the requests that had ended when half of a trace had arrived, and judged on the
    rest. The table is Markdown; differences to survival are told with their standard errors.
    """
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--requests", type=positive, metavar="N", help="only the first N of each trace"
    )
    parser.add_argument("--horizon", type=int, default=40, metavar="H")
    parser.add_argument("--frozen", action="store_true", help="nobody learns in the second half")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args(words)
    kinds = [BASELINE, *(kind for kind in arguments.kinds if kind != BASELINE)]
    print(table_head(*COLUMNS))
    rows = [row for trace in arguments.trace or JUDGED for row in judged(trace, kinds, arguments)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", "utf-8")
    return 0
