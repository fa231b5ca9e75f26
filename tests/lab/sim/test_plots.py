"""The pictures are drawn for every shape of experiment, and no label hides another."""

import builtins
import random
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from tests.extended import usually
from tests.lab.sim.service_run import run

from balanceroute.proxy.core.admission import AimdSettings
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.pictures import DPI, require_matplotlib
from balanceroute.proxy.lab.sim import plots
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import METRICS, PolicyResult
from balanceroute.proxy.lab.sim.plots import (
    WIDTH_INCHES,
    kv_shares,
    p99_s,
    windows,
    write_plots,
    write_prediction_plots,
    write_service_plots,
)
from balanceroute.proxy.lab.sim.recorder import ServiceLog
from balanceroute.traces import TraceRequest

NAMES = ["rank_loads.png", "imbalance_throughput.png", "throughput_wait.png"]
SIX = ["round-robin", "jsq", "least-kv", "fifo", "br-0", "br-h"]
TITLE = "fake.jsonl: 1,000 requests, saturated, backlog 64, 8 ranks x batch 16"


def fake(
    policies: Sequence[str],
    *,
    ranks: int = 8,
    steps: int = 30,
    segments: int = 3,
    waits: Sequence[float] = (0.5, 40.0),
) -> list[PolicyResult]:
    rng = random.Random(f"{policies}/{ranks}")
    results: list[PolicyResult] = []
    for index, policy in enumerate(policies):
        picture = [[rng.randrange(50_000, 200_000) for _ in range(ranks)] for _ in range(steps)]
        mean = dict.fromkeys(METRICS, 1.0) | {
            "mean_imbalance_tokens": sum(max(step) - min(step) for step in picture) / steps,
            "idle_fraction": rng.uniform(0.0, 0.4),
            "output_tokens_per_s": rng.uniform(2_000, 3_000),
            "pool_wait_s_p99": waits[index % len(waits)],
        }
        error = 0.05 if segments > 1 else 0.0
        stderr = {name: error * value for name, value in mean.items()}
        results.append(PolicyResult(policy, mean, stderr, picture))
    return results


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.parametrize(
    ("policies", "ranks", "steps", "segments"),
    [
        pytest.param(SIX, 8, 30, 3, id="six", marks=pytest.mark.extended),
        pytest.param(["br-0"], 8, 30, 1, id="one policy", marks=pytest.mark.extended),
        pytest.param([f"policy-{i}" for i in range(12)], 4, 30, 3, id="twelve"),
        pytest.param(
            [f"policy-{i}" for i in range(7)],
            4,
            30,
            3,
            id="an unfinished row",
            marks=pytest.mark.extended,
        ),
        pytest.param(["jsq", "br-h"], 1, 30, 3, id="one rank", marks=pytest.mark.extended),
        pytest.param(["jsq", "br-h"], 320, 2, 3, id="many ranks"),
        pytest.param(["jsq", "br-h"], 8, 1, 3, id="one step", marks=pytest.mark.extended),
        pytest.param(["$x_{", "_", "", "a\nb", "same", "same", "long " * 40], 4, 5, 3, id="names"),
    ],
)
def test_writes_three_pictures(
    tmp_path: Path, policies: list[str], ranks: int, steps: int, segments: int
) -> None:
    results = fake(policies, ranks=ranks, steps=steps, segments=segments)
    paths = write_plots(results, tmp_path, title=TITLE)
    assert paths == [tmp_path / name for name in NAMES]
    for path in paths:
        width, height = png_size(path)
        assert width == WIDTH_INCHES * DPI
        assert 0.2 * width < height < 1.2 * width
        assert path.stat().st_size > 10_000


@pytest.mark.parametrize("policies", [["jsq", "br-h"], ["br-h"], SIX], ids=len)
def test_a_prediction_stands_beside_what_was_measured(tmp_path: Path, policies: list[str]) -> None:
    live, simulated = fake(policies, segments=1), fake(policies)
    paths = write_prediction_plots(live, simulated, tmp_path, title=TITLE)
    assert paths == [tmp_path / "live_rank_loads.png", tmp_path / "live_simulated.png"]
    for path in paths:
        width, height = png_size(path)
        assert width == WIDTH_INCHES * DPI
        assert 0.2 * width < height < 1.2 * width


def test_every_bar_of_a_prediction_tells_its_figure() -> None:
    live, simulated = fake(SIX, segments=1), fake(SIX, ranks=4)
    figure = plots._draw_prediction(live, simulated, TITLE)
    idle, output = figure.axes
    for chart, metric, scale, digits in (
        (idle, "idle_fraction", 100.0, 1),
        (output, "output_tokens_per_s", 1.0, 0),
    ):
        labels = sorted(text.get_text() for text in chart.texts)
        wanted = [scale * result.mean[metric] for result in (*live, *simulated)]
        assert labels == sorted(f"{value:,.{digits}f}" for value in wanted)
        reach = chart.get_xlim()[1]
        assert reach > max(wanted)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["live", "simulated"]


def test_more_policies_take_more_rows() -> None:
    counts = (5, 7, 12)
    drawn = [plots._draw_rank_loads(fake(["jsq"] * count, ranks=1), TITLE) for count in counts]
    heights = [figure.get_size_inches()[1] for figure in drawn]
    assert heights == sorted(set(heights))


def test_only_the_results_decide_the_bytes(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    results = fake(["jsq", "br-0"], ranks=2)
    plain = [path.read_bytes() for path in write_plots(results, tmp_path, title=TITLE)]
    with matplotlib.rc_context({"font.size": 30.0, "lines.linewidth": 9.0}):
        before = dict(matplotlib.rcParams)
        again = [path.read_bytes() for path in write_plots(results, tmp_path, title=TITLE)]
        assert dict(matplotlib.rcParams) == before
    assert again == plain


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param((1.0, 2.0, 3.0), id="linear"),
        pytest.param((0.01, 1.0, 300.0), id="log"),
        pytest.param((0.0, 0.01, 300.0), id="log, and one never waits"),
        pytest.param((0.0,), id="no wait"),
        pytest.param((7.0,), id="all alike"),
    ],
)
@pytest.mark.parametrize("count", usually({12}, [1, 12]))
def test_labels_of_points_keep_apart(waits: tuple[float, ...], count: int) -> None:
    names = [f"policy-{i}" for i in range(count)]
    figure = plots._draw_throughput_wait(fake(names, waits=waits), TITLE)
    figure.draw_without_rendering()
    (chart,) = figure.axes
    inside = chart.get_window_extent()
    labels = {text.get_text(): text.get_window_extent() for text in chart.texts}
    labels.pop("", None)  # The lines that lead to a point.
    assert sorted(labels) == sorted(names)
    for label in labels.values():
        assert inside.x0 <= label.x0
        assert label.x1 <= inside.x1
    for one, other in combinations(labels.values(), 2):
        assert not one.overlaps(other)


@pytest.mark.parametrize("policies", [SIX, ["long name " * 9] * 12])
def test_nothing_is_clipped(policies: list[str]) -> None:
    for draw in (
        plots._draw_rank_loads,
        plots._draw_imbalance_throughput,
        plots._draw_throughput_wait,
    ):
        figure = draw(fake(policies), "a workload with a long name " * 20)
        figure.draw_without_rendering()
        extent = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert extent.x0 >= 0
        assert extent.y0 >= 0
        assert extent.x1 <= width
        assert extent.y1 <= height


def test_missing_matplotlib_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ConfigError, match=r"--plots needs the extra plots: pip install '\.\[plots\]'"
    ):
        write_plots(fake(SIX), tmp_path, title=TITLE)
    with pytest.raises(ConfigError, match="--plots needs the extra plots"):
        require_matplotlib()
    assert not list(tmp_path.iterdir())


def test_another_missing_module_is_not_blamed_on_matplotlib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.style", raising=False)
    real = builtins.__import__

    def broken(name: str, *arguments: object, **named: object) -> object:
        if name == "matplotlib.style":
            raise ImportError("a broken binary")
        return real(name, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ImportError, match="a broken binary"):
        require_matplotlib()


# Pictures of tenants and classes over time: what they show.


MS = 1_000_000
FIXED = AimdSettings(cap_min=7, cap_max=7, cap_initial=7)


def measured(aimd: AimdSettings | None = None) -> ServiceLog:
    """`a` sends for 8 s, and `b` from 4 s on as much, of the same size."""
    one = TraceRequest(0, 100, 20)
    requests = [replace(one, arrival_ns=20 * MS * i, tenant="a") for i in range(400)]
    requests += [replace(one, arrival_ns=(4_000 + 20 * i) * MS, tenant="b") for i in range(200)]
    service = run(SimulatedDeployment(1, 64, step_base_ns=5 * MS, aimd=aimd), requests).service
    assert service is not None
    return service


def result(service: ServiceLog | None) -> PolicyResult:
    zeros = dict.fromkeys(METRICS, 0.0)
    return PolicyResult("fifo", zeros, zeros, [], service=service)


def test_shares_are_those_of_each_window() -> None:
    alone, between, both = kv_shares(measured(), np.array([0.0, 3.0, 5.0, 7.0])).T
    assert alone == pytest.approx([1.0, 0.0])
    assert 0.5 < between[0] < 1.0
    assert both == pytest.approx([0.5, 0.5], abs=0.02)


def test_first_tokens_count_where_they_came() -> None:
    service = measured()
    before, after = p99_s(service, 1, np.array([0.0, 4.0, 7.0]))
    assert isnan(before)
    # They join the step after the one that runs as they arrive.
    assert 0.005 < after < 0.1
    came, took = service.first_tokens(0)
    assert len(came) == len(took) == 400


def test_windows_are_so_few_that_percentiles_mean_something() -> None:
    """800 requests of three tenants in 60 windows had a chart with hardly a line."""
    requests = [TraceRequest(20 * MS * i, 100, 20, tenant="abc"[i % 3]) for i in range(800)]
    service = run(SimulatedDeployment(1, 64, step_base_ns=5 * MS), requests).service
    assert service is not None
    assert windows(service) == 800 // 60
    edges_s = np.linspace(0.0, service.samples[-1].time_ns / 1e9, windows(service) + 1)
    for group in range(3):
        assert sum(isnan(one) for one in p99_s(service, group, edges_s)) <= 1


@pytest.mark.parametrize("aimd", [None, FIXED])
def test_each_policy_that_was_measured_has_its_picture(
    tmp_path: Path, aimd: AimdSettings | None
) -> None:
    service = measured(aimd)
    # One rank is open. A limit that stays is noted once.
    assert [limit for _, limit in service.limits] == ([] if aimd is None else [7])
    paths = write_service_plots([result(service), result(None)], tmp_path, title="$x_{")
    assert paths == [tmp_path / "service_fifo.png"]
    assert paths[0].stat().st_size > 10_000
