"""The table of the predictors that learn, and what live and simulation list of it."""

from importlib.util import find_spec

import pytest

from balanceroute.predictors import PastRequest, RequestFeatures
from balanceroute.predictors.files import KINDS, train
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.sim.experiment import FORECASTS
from balanceroute.proxy.live.prediction import PREDICTORS

PAST = [
    PastRequest(float(i), i + 1.0, RequestFeatures(8 + i % 9), 20 + i * 7 % 60) for i in range(400)
]


def test_everybody_lists_the_predictors_that_he_can_make() -> None:
    assert [*KINDS] == ["survival", "exact-match", "gbdt"]
    assert [*PREDICTORS] == ["none", "survival", "exact-match"]
    assert [*FORECASTS] == ["survival", "exact-match", "gbdt", "thirds", "oracle", "none"]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_trained_is_saved_and_restored_under_its_name(name: str) -> None:
    if name == "gbdt" and find_spec("lightgbm") is None:
        pytest.skip("lightgbm is not installed")
    KINDS[name].require()
    state = train(name, PAST).state()
    assert state.kind == name
    assert KINDS[name].restored(state).state() == state


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'crystal'; known: survival, exact-match, gbdt"):
        train("crystal", PAST)
