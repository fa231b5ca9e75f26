"""Predictors by name or file: each run has its own, which knows what came before its segment."""

from pathlib import Path

import numpy as np
import pytest

from balanceroute.predictors import ExactMatch, NoPrediction, Oracle, Survival, save
from balanceroute.predictors.past import features_of
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.sim.experiment import FORECASTS, forecast_called
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

SETTINGS = PolicySettings()
PAST = [TraceRequest(number, 100, 5 + number % 3, (number % 2,)) for number in range(60)]
WORKLOAD = Workload([TraceRequest(0, 100, 9, (0,))], PAST)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("survival", Survival),
        ("exact-match", ExactMatch),
        ("oracle", Oracle),
        ("none", NoPrediction),
    ],
)
def test_every_name_makes_its_own_kind_anew_for_each_run(name: str, kind: type) -> None:
    forecast = forecast_called(name)
    one, other = (forecast(WORKLOAD, SETTINGS) for _ in range(2))
    assert type(one) is type(other) is kind
    assert one is not other


def test_gbdt_needs_a_past_to_train_on() -> None:
    with pytest.raises(ConfigError, match=r"too few to train on, .* --known N"):
        FORECASTS["gbdt"](Workload(WORKLOAD.requests, []), SETTINGS)


@pytest.mark.parametrize("name", ["survival", "exact-match"])
def test_the_past_is_known(name: str) -> None:
    predictor = FORECASTS[name](WORKLOAD, SETTINGS)
    predictor.begin(RequestId(0), features_of(WORKLOAD.requests[0]))
    row = predictor.survival([RequestId(0)], np.array([0]), 8)[0]
    assert row[4] > 0.9
    assert row[8] < 0.2


def test_a_file_is_read_for_every_run(tmp_path: Path) -> None:
    path = tmp_path / "trained.json"
    save(path, Survival([4] * 50))
    forecast = forecast_called(str(path))
    one, other = (forecast(WORKLOAD, SETTINGS) for _ in range(2))
    for _ in range(50):
        one.observe(RequestId(0), 90)
    ask = [RequestId(1)], np.array([0]), 10
    assert one.survival(*ask)[0, 10] > 0.1
    assert other.survival(*ask)[0, 10] == 0.0


def test_what_is_neither_a_name_nor_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'crystal' is no file, and none of survival, exact"):
        forecast_called("crystal")


def test_thirds_tell_apart_and_not_more() -> None:
    played = [TraceRequest(0, 100, output) for output in (5, 50, 500)]
    past = [TraceRequest(0, 100, output) for output in (4, 6, 40, 60, 400, 600) * 50]
    predictor = FORECASTS["thirds"](Workload(played, past), SETTINGS)
    requests = [RequestId(number) for number in range(3)]
    for request, traced in zip(requests, played, strict=True):
        predictor.begin(request, features_of(traced))
    survival = predictor.survival(requests, np.zeros(3, np.int64), 450)
    assert survival[0, [3, 10]] == pytest.approx([1.0, 0.0], abs=0.1)
    assert survival[1, [30, 100]] == pytest.approx([1.0, 0.0], abs=0.1)
    # Half of the long third is longer, whatever this one's own output.
    assert survival[2, 450] == pytest.approx(0.5, abs=0.1)
