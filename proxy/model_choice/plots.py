"""Pictures of a training, and of what a choice sends where."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.lab.pictures import SOFT, empty_figure, write_pictures
from balanceroute.proxy.model_choice.judgement import Judgement
from balanceroute.proxy.model_choice.scenario import Scenario
from balanceroute.proxy.model_choice.training import Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TICKS = (0.25, 1.0, 4.0, 16.0, 48.0)
# Distinct with every common colour blindness (Okabe and Ito); further groups repeat them.
_COLOURS = ("#0067a5", "#e69f00", "#d55e00", "#009e73", "#cc79a7")


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def write_training(scenario: Scenario, windows: Sequence[Window], directory: Path) -> list[Path]:
    """Write `training.png`: the reward and the groups' shares over the requests.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """

    def draw() -> "Figure":
        lines = ["Rates change all the time; at first groups are tried at random."]
        figure = empty_figure(7.0, 4.6, "Training of a model router", lines)
        reward, shares = figure.subplots(2, 1, sharex=True)
        steps = [window.step for window in windows]
        reward.plot(steps, [window.reward for window in windows], color=SOFT, marker=".")
        reward.set(ylabel="worth of an answer", ylim=(0, 1.02))
        _stack(shares, steps, [window.shares for window in windows], scenario)
        shares.set(xlabel="requests", ylabel="share of requests")
        figure.legend(frameon=False, loc="outside lower center", ncols=len(scenario.groups))
        return figure

    return write_pictures({"training": draw}, directory)


def write_mix(
    scenario: Scenario, judgements: Mapping[float, Judgement], title: str, directory: Path
) -> list[Path]:
    """Write `mix.png`: which group answers, by rate, for all tasks and for each.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """

    def draw() -> "Figure":
        names: list[str | None] = [None, *scenario.tasks]
        figure = empty_figure(2.4 * len(names), 3.0, "Which model answers, by rate", [title])
        charts = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for place, (chart, name) in enumerate(zip(charts, names, strict=True)):
            task = None if name is None else place - 1
            rows = [one.shares(len(scenario.groups), task) for one in judgements.values()]
            # The legend once: the colours are the same.
            _stack(chart, list(judgements), rows, scenario, labels=place == 0)
            chart.set(title=name or "all tasks", xlabel="requests/s", xscale="log")
            # The usual labels of such a scale are formulas, which pictures here do not draw.
            chart.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], minor=False)
            chart.set_xticks([], minor=True)
        charts[0].set(ylabel="share of requests")
        figure.legend(frameon=False, loc="outside lower center", ncols=len(scenario.groups))
        return figure

    return write_pictures({"mix": draw}, directory)


def _stack(
    chart: "Axes",
    x: Sequence[float],
    rows: Sequence[Sequence[float]],
    scenario: Scenario,
    *,
    labels: bool = True,
) -> None:
    columns = list(zip(*rows, strict=True))
    names = [group.name for group in scenario.groups]
    colours = [_colour(place) for place in range(len(names))]
    chart.stackplot(x, columns, labels=names if labels else [], colors=colours)
    chart.set(ylim=(0, 1), xlim=(min(x), max(x)))
