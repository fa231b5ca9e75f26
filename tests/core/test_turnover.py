"""The measured turnover: what counts, how fast it is known, how fast it is forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.projection import Form, Projection
from balanceroute.proxy.core.turnover import Turnover


def advance(turnover: Turnover, departures: int) -> None:
    for _ in range(departures):
        turnover.leave()
    turnover.step()


def test_nothing_turns_over_before_the_first_step() -> None:
    turnover = Turnover(2)
    turnover.leave()
    assert turnover.per_rank_step == 0.0


def test_the_first_steps_count_alike() -> None:
    turnover = Turnover(4)
    for departures in (0, 6, 2, 0):
        advance(turnover, departures)
    assert turnover.per_rank_step == pytest.approx(8 / 4 / 4)


def test_the_past_is_forgotten() -> None:
    turnover = Turnover(1)
    for _ in range(1000):
        advance(turnover, 1)
    for _ in range(1000):
        advance(turnover, 0)
    assert 0.0 < turnover.per_rank_step < 0.001


@given(ranks=st.integers(1, 8), departures=st.lists(st.integers(0, 20), min_size=1, max_size=300))
def test_the_rate_is_between_the_least_and_the_most(ranks: int, departures: list[int]) -> None:
    turnover = Turnover(ranks)
    for count in departures:
        advance(turnover, count)
        assert min(departures) / ranks <= turnover.per_rank_step + 1e-9
        assert turnover.per_rank_step <= max(departures) / ranks + 1e-9


def test_a_projection_counts_departures_and_not_admissions() -> None:
    projection = Projection(
        ranks=2,
        horizon_steps=3,
        refresh_tokens=5,
        predictor=NoPrediction(),
        form=Form.EXPECTED,
    )
    for number in range(6):
        projection.bind(RequestId(number), RankId(number % 2), 10, 0)
    projection.step()
    assert projection.turnover.per_rank_step == 0.0
    for number in range(3):
        projection.unbind(RequestId(number))
    projection.step()
    assert projection.turnover.per_rank_step == pytest.approx(3 / 2 / 2)
