"""The scores of predictions: which rows are judged, by what, and what comes of it."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.predictors import Oracle, Survival
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.prediction import Scoreboard
from balanceroute.proxy.live.telemetry.snapshot import PredictorScores

H = 10


class Fixed:
    """Says of every request that it goes on for so many more steps with certainty, or half of it."""

    def __init__(self, remaining: int, share: float = 1.0) -> None:
        self.remaining = remaining
        self.share = share

    def begin(self, request: RequestId, features: object) -> None: ...
    def observe(self, request: RequestId, output_tokens: int) -> None: ...
    def forget(self, request: RequestId) -> None: ...

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        del ages
        gone = np.arange(steps + 1) >= self.remaining
        return np.tile(np.where(gone, 1.0 - self.share, 1.0), (len(requests), 1))


class Board:
    """A scoreboard, with what it told of errors."""

    def __init__(self, *predictors: Fixed | Oracle | Survival, window: int = 100) -> None:
        self.errors: list[float] = []
        self.predictors = predictors
        self.board = Scoreboard(
            len(predictors), horizon_steps=H, observe_error=self.errors.append, window=window
        )

    def open(self, *requests: tuple[int, int]) -> None:
        numbers = [RequestId(number) for number, _ in requests]
        ages = np.array([age for _, age in requests])
        assert all(map(self.board.is_free, numbers, ages.tolist()))
        said = [self.board.ask(one, numbers, ages) for one in self.predictors]
        self.board.note(numbers, ages, said)

    def scores(self, place: int = 0) -> PredictorScores:
        return self.board.scores(place, name="x", active=True, failed=False)


def test_before_any_row_is_judged_nothing_is_defined() -> None:
    board = Board(Fixed(3))
    board.open((1, 0))
    scores = board.scores()
    assert scores.rows == 0
    assert (scores.auc, scores.brier, scores.ece, scores.mae) == (None, None, None, None)
    assert scores.predicted == scores.observed == (None,) * 10
    assert scores.decile_rows == (0,) * 10


def test_a_right_and_a_wrong_prediction() -> None:
    board = Board(Fixed(3))
    board.open((1, 5), (2, 0))
    board.board.ended(RequestId(1), 8)
    scores = board.scores()
    assert (scores.rows, scores.brier, scores.mae) == (1, 0.0, 0.0)
    board.board.ended(RequestId(2), 7)
    scores = board.scores()
    assert (scores.rows, scores.brier, scores.mae) == (2, 0.0, 2.0)
    assert scores.observed[9] == 1.0
    assert board.errors == [0.0, 4.0]


def test_the_horizon_is_part_of_the_window() -> None:
    board = Board(Fixed(3))
    board.open((1, 0), (2, 0))
    board.board.ended(RequestId(1), H)
    assert board.scores().observed[9] == 1.0
    board.board.ended(RequestId(2), H + 1)
    assert board.scores().observed[9] == 0.5
    assert board.errors == [H - 3, H - 3]


def test_a_request_that_goes_on_is_judged_once_it_is_beyond_the_horizon() -> None:
    board = Board(Fixed(3))
    board.open((1, 5))
    # With its tenth token it may have emitted the last one.
    assert not board.board.is_free(RequestId(1), 5 + H)
    assert board.board.judged == 0
    assert board.board.is_free(RequestId(1), 6 + H)
    assert board.board.judged == 1
    assert board.scores().brier == 1.0
    board.open((1, 6 + H))
    board.board.ended(RequestId(1), 9 + H)
    assert board.scores().brier == 0.5
    assert len(board.board) == 0


def test_a_request_that_is_cut_off_is_judged_only_if_it_outlived_its_row() -> None:
    board = Board(Fixed(3))
    board.open((1, 0), (2, 0), (3, 0))
    board.board.cut_off(RequestId(1), H)
    board.board.cut_off(RequestId(2), H + 1)
    assert board.board.judged == 1
    assert board.scores().brier == 1.0
    assert len(board.board) == 1
    board.board.cut_off(RequestId(9), 5)
    board.board.ended(RequestId(9), 5)
    assert board.board.judged == 1


def test_an_age_beyond_the_end_was_no_age() -> None:
    board = Board(Fixed(3))
    board.open((1, 20), (2, 20))
    board.board.ended(RequestId(1), 20)
    assert (board.board.judged, len(board.board)) == (0, 1)


def test_every_predictor_has_its_own_scores_on_the_same_rows() -> None:
    outputs = {RequestId(number): 1 + number for number in range(20)}
    board = Board(Fixed(3, 0.5), Oracle(outputs), Survival(range(1, 21)))
    board.open(*((number, 0) for number in outputs))
    for number, output in outputs.items():
        board.board.ended(number, output)
    coin, oracle, survival = map(board.scores, range(3))
    assert coin.rows == oracle.rows == survival.rows == 20
    assert (coin.auc, coin.brier) == (0.5, 0.25)
    assert (oracle.auc, oracle.brier, oracle.mae, oracle.ece) == (1.0, 0.0, 0.0, 0.0)
    # It knows the distribution and nothing more: half of them end within the horizon.
    assert survival.auc == 0.5
    assert survival.brier == pytest.approx(0.25, abs=0.001)
    assert survival.mae == pytest.approx(np.abs(np.arange(1, 11) - 5.5).mean(), abs=0.01)
    assert oracle.decile_rows == (10, 0, 0, 0, 0, 0, 0, 0, 0, 10)
    assert oracle.predicted[9] == oracle.observed[9] == 1.0
    assert oracle.predicted[5] is None


def test_old_rows_count_no_more() -> None:
    board = Board(Fixed(3), window=4)
    for number in range(10):
        board.open((number, 0))
        board.board.ended(RequestId(number), 3 if number >= 6 else 3 * H)
    assert board.board.judged == 10
    assert (board.scores().rows, board.scores().brier) == (4, 0.0)


def test_a_drift_shows() -> None:
    board = Board(Survival([5] * 100), window=200)
    for number in range(1000):
        board.open((number, 0))
        board.board.ended(RequestId(number), 5 if number < 500 else 3 * H)
        if number == 499:
            assert board.scores().brier == 0.0
    assert board.scores().brier == 1.0


def test_a_predictor_that_failed_has_no_scores() -> None:
    board = Board(Fixed(3))
    board.open((1, 0))
    board.board.ended(RequestId(1), 3)
    scores = board.board.scores(0, name="x", active=False, failed=True)
    assert (scores.rows, scores.brier, scores.failed) == (0, None, True)
