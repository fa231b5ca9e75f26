"""`balanceroute model-router`: train and judge the choice among several models."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from balanceroute.proxy.cli.outputs import (
    StageBar,
    add_output_flags,
    answer,
    as_json_text,
    check_output,
    check_outputs,
    make_plots_folder,
)
from balanceroute.proxy.core.setting import integer, number
from balanceroute.proxy.lab.model_choice.environment import (
    Scenario,
    bursty,
    paper_scenario,
    read_scenario,
    stable,
)
from balanceroute.proxy.lab.model_choice.training import (
    RATES,
    THRESHOLDS,
    ChoiceJudgement,
    Trainer,
    TrainingWindow,
    judge,
    write_mix,
    write_training,
)
from balanceroute.proxy.model_choice import WINDOW, DoubleDqn, Greedy, GroupOutlook, Static
from balanceroute.proxy.settings import add_flags, read_flags
from balanceroute.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balanceroute.proxy.model_choice import ModelChoice

_LENGTHS = Path("azure_2023_conv")
_PHASE_S = 40  # Of a stable rate, as in the paper.
_LEAST_REQUESTS = 1_000
_BURSTY_REQUESTS = 8_000
_CHOICES = 2_000  # Timed.


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTraining:
    requests: int = integer(120_000, "requests to learn from", 2_000, 10**8)
    seed: int = integer(0, "of what is drawn", 0, (1 << 31) - 1)
    window_mean: float | None = number(
        None,
        f"have windows of {WINDOW} answers in a row keep this share of what the best model's would be "
        "worth, beside the mean of all",
        0.5,
        1.0,
        word="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterJudgement:
    seed: int = integer(1, "of what is drawn", 0, (1 << 31) - 1)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "model-router",
        help="train and judge the choice among several models",
        description=__doc__,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    train = actions.add_parser(
        "train",
        help="learn which model answers, in virtual time",
        description="Learn which model answers (double deep Q-learning), in virtual time.",
    )
    train.set_defaults(run=run_train)
    train.add_argument("--out", required=True, type=Path, metavar="FILE", help="the weights (.npz)")
    add_flags(train.add_argument_group("training"), RouterTraining)
    evaluate = actions.add_parser(
        "evaluate",
        help="compare choices at several rates, in virtual time",
        description="Compare each model alone, the greedy choice, and weights that were trained.",
    )
    evaluate.set_defaults(run=run_evaluate)
    evaluate.add_argument(
        "--weights", type=Path, metavar="FILE", help="what `model-router train` wrote"
    )
    add_output_flags(evaluate, plots=False)
    add_flags(evaluate.add_argument_group("judgement"), RouterJudgement)
    for action in (train, evaluate):
        action.add_argument(
            "--scenario",
            type=Path,
            metavar="FILE",
            help="the groups, tasks, scores and targets, as TOML (default: three models with the "
            "scores of the paper)",
        )
        action.add_argument(
            "--trace",
            type=Path,
            default=_LENGTHS,
            metavar="FILE",
            help=f"whose lengths the requests have (default: {_LENGTHS})",
        )
        action.add_argument("--plots", type=Path, metavar="DIR", help="write pictures (PNG)")


def run_train(arguments: argparse.Namespace) -> int:
    settings = read_flags(arguments, RouterTraining).read(RouterTraining)
    check_output("--out", arguments.out)
    scenario, lengths = _read(arguments)
    windows: list[TrainingWindow] = []
    trainer = Trainer(
        scenario,
        lengths,
        steps=settings.requests,
        seed=settings.seed,
        window_mean=settings.window_mean,
    )
    begin_s = time.perf_counter()
    with StageBar() as bar:

        def progress(window: TrainingWindow) -> None:
            windows.append(window)
            bar.show("training", window.step / settings.requests)

        choice = trainer.train(progress)
    trained_s = time.perf_counter() - begin_s
    choice.write(arguments.out)
    if arguments.plots is not None:
        write_training(scenario, windows, arguments.plots)
    mix = ", ".join(
        f"{group.name} {100 * share:.0f} %"
        for group, share in zip(scenario.groups, windows[-1].shares, strict=True)
    )
    Console().print(
        f"Trained on {settings.requests:,} requests in {trained_s:.0f} s; at the end an answer was worth "
        f"{windows[-1].reward:.3f} ({mix}). Written: {arguments.out}",
        markup=False,
        highlight=False,
    )
    return 0


def run_evaluate(arguments: argparse.Namespace) -> int:
    seed = read_flags(arguments, RouterJudgement).read(RouterJudgement).seed
    check_outputs(arguments)
    scenario, lengths = _read(arguments)
    choices = _choices(scenario, arguments.weights)
    rates: dict[str, dict[float, ChoiceJudgement]] = {}
    bursts: dict[str, ChoiceJudgement] = {}
    with StageBar() as bar:
        for place, (name, choice) in enumerate(choices.items()):
            bar.show("judging", place / len(choices))
            rates[name] = {
                rate: judge(scenario, lengths, choice, _stable(rate, seed), seed) for rate in RATES
            }
            gaps = bursty(_BURSTY_REQUESTS, np.random.default_rng(seed))
            bursts[name] = judge(scenario, lengths, choice, gaps, seed)
    figures = {
        name: {
            "mean_by_rate": {str(rate): one.mean for rate, one in rates[name].items()},
            "bursty_mean": bursts[name].mean,
            "bursty_windows": dict(zip(map(str, THRESHOLDS), bursts[name].windows(), strict=True)),
        }
        for name in choices
    }
    choice_us = {name: _choice_us(one, scenario) for name, one in choices.items()}
    answer(arguments, lambda: _print(rates, bursts, choice_us), lambda: as_json_text(figures))
    if arguments.plots is not None:
        shown = list(choices)[-1]
        write_mix(scenario, rates[shown], f"Choice: {shown}", arguments.plots)
    return 0


def _stable(rate: float, seed: int) -> "Iterator[float]":
    requests = max(_LEAST_REQUESTS, round(_PHASE_S * rate))
    return stable(rate, requests, np.random.default_rng(seed))


def _read(arguments: argparse.Namespace) -> tuple[Scenario, list[tuple[int, int]]]:
    """Read the scenario and the lengths, and find out now that pictures cannot be drawn."""
    make_plots_folder(arguments.plots)
    chosen = arguments.scenario
    scenario = paper_scenario() if chosen is None else read_scenario(chosen)
    trace = read_trace(arguments.trace)
    return scenario, [(one.prompt_tokens, one.output_tokens) for one in trace]


def _choices(scenario: Scenario, weights: Path | None) -> "Mapping[str, ModelChoice]":
    choices: dict[str, ModelChoice] = {
        f"always {group.name}": Static(place) for place, group in enumerate(scenario.groups)
    }
    choices["greedy"] = Greedy()
    if weights is not None:
        groups, tasks = len(scenario.groups), len(scenario.tasks)
        choices["ddqn"] = DoubleDqn.read(weights, groups=groups, tasks=tasks)
    return choices


def _choice_us(choice: "ModelChoice", scenario: Scenario) -> float:
    outlooks = [GroupOutlook(0.5) for _ in scenario.groups]
    begin_s = time.perf_counter()
    for place in range(_CHOICES):
        choice.choose(place % len(scenario.tasks), 10.0, outlooks)
    return 1e6 * (time.perf_counter() - begin_s) / _CHOICES


def _print(
    rates: "Mapping[str, Mapping[float, ChoiceJudgement]]",
    bursts: "Mapping[str, ChoiceJudgement]",
    choice_us: "Mapping[str, float]",
) -> None:
    console = Console()
    table = Table(title="Mean worth of an answer, by requests/s")
    table.add_column("requests/s", justify="right")
    for name in rates:
        table.add_column(name, justify="right")
    for rate in RATES:
        table.add_row(f"{rate:g}", *(f"{rates[name][rate].mean:.3f}" for name in rates))
    console.print(table)
    table = Table(
        title=f"Rates that change: windows of {WINDOW} answers in a row by their mean",
        caption="An answer is worth its score if it keeps the targets, else nothing.",
    )
    table.add_column("mean of all", justify="left")
    for name in bursts:
        table.add_column(name, justify="right")
    table.add_row("all answers", *(f"{one.mean:.3f}" for one in bursts.values()))
    for place, threshold in enumerate(THRESHOLDS):
        counts = (f"{one.windows()[place]:,}" for one in bursts.values())
        table.add_row(f"at least {threshold:.2f}", *counts)
    table.add_row("us a choice", *(f"{choice_us[name]:.1f}" for name in bursts))
    console.print(table)
