"""What predictors of output lengths are worth: to BR-H in the simulator, and by themselves."""

import argparse
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import floor, log2
from pathlib import Path
from statistics import median

from tests.support.arguments import positive

from balanceroute.predictors.evaluation import Replay, cut_in_time, judge
from balanceroute.predictors.kinds import KINDS, train
from balanceroute.predictors.past import past_requests
from balanceroute.proxy.cli.judgement_report import gain_cell, number_cell
from balanceroute.proxy.core.policies import POLICIES, PolicySettings
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import FORECASTS, run_experiment
from balanceroute.proxy.lab.sim.workload import Workload, split
from balanceroute.traces import TraceRequest, read_trace
from experiment import (
    AZURE_CODE,
    AZURE_CONV,
    MOONCAKE,
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
TEMPLATES, RECURRING = 400, 8000
LIMITED = 11_000
FIGURES = ("idle_fraction", "output_tokens_per_s", "tpot_ms_p95", "pool_wait_s_p99")


def recurring(trace: Path, seed: str, deviation: float) -> list[TraceRequest]:
    """Return requests made of templates; see `predictors`."""
    rng = random.Random(seed)
    templates = rng.sample(requests_of(trace), TEMPLATES)
    weights = list(accumulate(1 / (place + 1) for place in range(TEMPLATES)))
    places = rng.choices(range(TEMPLATES), cum_weights=weights, k=RECURRING)
    return [
        TraceRequest(
            number * 300_000_000,
            templates[place].prompt_tokens,
            max(1, round(templates[place].output_tokens * rng.lognormvariate(0.0, deviation))),
            # One block that no other template has: the whole prompt recurs, or nothing of it.
            (place,),
        )
        for number, place in enumerate(places)
    ]


def budgets() -> list[TraceRequest]:
    """Return the ServeGen trace cut at a limit for each client; see `predictors`."""
    requests = requests_of(SERVEGEN)
    answers: dict[tuple[int, ...], list[int]] = {}
    for request in requests:
        answers.setdefault(request.hash_ids, []).append(request.output_tokens)
    limits = {client: 2 ** floor(log2(median(lengths))) for client, lengths in answers.items()}
    return [
        replace(
            request,
            output_tokens=min(request.output_tokens, limits[request.hash_ids]),
            max_tokens=limits[request.hash_ids],
        )
        for request in requests[:LIMITED]
    ]


@dataclass(frozen=True)
class Scenario:
    """One table."""

    name: str  # What it is called.
    requests: Callable[[], list[TraceRequest]]  # Makes the trace.
    rate: float | None = None  # Of an open loop; None for 64 requests that always wait.
    # Makes what predictors have learned from instead of the trace's own past.
    learned: Callable[[], list[TraceRequest]] | None = None
    # Which of `FORECASTS` are compared, or policies without one, beside BR-0.
    predictors: tuple[str, ...] = (*KINDS, "oracle", "none")

    def workloads(self) -> list[Workload]:
        cut = split(
            self.requests(),
            segments=SEGMENTS,
            rate=self.rate,
            backlog=64 if self.rate is None else None,
            known=KNOWN if self.learned is None else 0,
        )
        if self.learned is None:
            return cut
        history = self.learned()
        return [replace(workload, history=history) for workload in cut]


_MOONCAKE, _AZURE_CONV, _AZURE_CODE = (
    partial(requests_of, trace) for trace in (MOONCAKE, AZURE_CONV, AZURE_CODE)
)
SCENARIOS = (
    Scenario("mooncake, saturated", _MOONCAKE),
    Scenario("mooncake, rate 1.3", _MOONCAKE, rate=1.3),
    Scenario("azure conversation, saturated", _AZURE_CONV),
    Scenario("azure code, saturated", _AZURE_CODE),
    Scenario("recurring prompts, saturated", partial(recurring, MOONCAKE, "recurring", 0.1)),
    Scenario("wrong model, saturated", _MOONCAKE, learned=_AZURE_CODE),
    Scenario(
        "recurring reasoning tasks",
        partial(recurring, SERVEGEN, "rec", 0.3),
        predictors=("fifo", "survival", "exact-match", "gbdt", "oracle"),
    ),
    Scenario("limits as budgets", budgets, predictors=("fifo", "survival", "oracle")),
)


def run(scenario: int, predictor: str, segment: int) -> dict[str, float]:
    """Simulate one segment; return its figures. A policy for `predictor` runs without one."""
    alone = predictor in POLICIES
    (result,) = run_experiment(
        SimulatedDeployment(ranks=8, batch_limit=BATCH),
        [SCENARIOS[scenario].workloads()[segment]],
        [predictor if alone else "br-h"],
        PolicySettings(),
        FORECASTS["none" if alone else predictor],
    )
    return {name: result.mean[name] for name in FIGURES}


def report(scenario: Scenario, figures: dict[str, list[dict[str, float]]]) -> None:
    """Print one scenario's table."""
    print(f"\n{scenario.name}, 8 ranks x {BATCH}\n")
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
    * recurring reasoning tasks: the same of the ServeGen trace, with a factor of 30 %, as when a task is
      rolled out several times.
    * limits as budgets: 11,000 requests of the ServeGen trace, whose clients set `max_tokens`, and whose
      answers are cut there. No trace records limits, so these are assumed: the power of two below the median
      of the client's answers, so that at least half of them reach it.
    * wrong: the Mooncake trace, with predictors that have learned from the Azure code trace instead (mean
      output 28 tokens, against 343).
    """
    parser.add_argument("--only", default="", metavar="WORDS", help="scenarios with these words")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="processes")
    arguments = parser.parse_args(words)
    chosen = [i for i, one in enumerate(SCENARIOS) if arguments.only in one.name]
    if not chosen:
        parser.error(f"--only: of {'; '.join(one.name for one in SCENARIOS)}")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        pending = {
            i: {
                predictor: pool.map(partial(run, i, predictor), range(SEGMENTS))
                for predictor in (*SCENARIOS[i].predictors, "br-0")
            }
            for i in chosen
        }
        for i, runs_of in pending.items():
            figures = {predictor: list(runs) for predictor, runs in runs_of.items()}
            report(SCENARIOS[i], figures)
    return 0


BASELINE, HORIZON = "survival", 40
# Of a row behind trace and predictor: scores, and by how much they are better than the baseline's. Digits.
SCORES = {"auc": 3, "brier": 4, "ece": 3, "mae": 2}
GAINED = {"auc": 4, "brier": 4, "mae": 2}
COLUMNS = (
    *("trace", "predictor", "AUC:", "Brier:", "calibration error:", "MAE tokens:"),
    *(f"{name} better than {BASELINE} by:" for name in ("AUC", "Brier", "MAE")),
)


def predictor_table(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Judge each kind of predictor on each public trace: the counterpart of the paper's Table 3.

    Each is trained on the requests that had ended when half of a trace had arrived, and judged on the
    rest. The table is Markdown; differences to survival are told with their standard errors.
    """
    parser.add_argument(
        "--requests", type=positive, metavar="N", help="only the first N of each trace"
    )
    arguments = parser.parse_args(words)
    print(table_head(*COLUMNS))
    for trace in (AZURE_CONV, AZURE_CODE, MOONCAKE):
        cut = cut_in_time(past_requests(read_trace(trace)[: arguments.requests]), 0.5)
        replay = Replay(cut.after, horizon_steps=HORIZON, from_s=cut.at_s)
        trained = {kind: train(kind, cut.before, horizon_steps=HORIZON) for kind in KINDS}
        for kind, judgement in judge(replay, trained, baseline=BASELINE).items():
            cells = [number_cell(getattr(judgement.scores, name), n) for name, n in SCORES.items()]
            gains = (
                "" if kind == BASELINE else gain_cell(judgement.gains[name], n)
                for name, n in GAINED.items()
            )
            print(table_row(f"`{trace.name}`", f"`{kind}`", *cells, *gains), flush=True)
