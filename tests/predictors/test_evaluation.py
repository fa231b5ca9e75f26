"""Predictors side by side: scores by their definitions, gains by row, and errors that mean something."""

import random
import re
from collections.abc import Sequence
from math import floor, isnan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.script import ROOT, run_script, script

from balanceroute.predictors import (
    NoPrediction,
    Oracle,
    PastRequest,
    Predictor,
    RequestFeatures,
    Survival,
    evaluation,
    measures,
)
from balanceroute.predictors.evaluation import (
    GAINS,
    Answers,
    PredictorJudgement,
    Replay,
    Rows,
    cut_in_time,
    judge,
    scores_of,
)
from balanceroute.predictors.kinds import KINDS
from balanceroute.proxy.core.errors import ConfigError, PredictorError
from balanceroute.proxy.core.events import RequestId

HORIZON = 10


def rows_and_answers(table: list[tuple[int, float, float, int]]) -> tuple[Rows, Answers]:
    remaining = np.array([row[0] for row in table])
    rows = Rows(
        horizon_steps=HORIZON,
        request=np.arange(len(table)),
        age=np.zeros(len(table), np.int64),
        remaining=remaining,
        finishes=remaining <= HORIZON,
    )
    answers = Answers(
        p_finish=np.array([row[1] for row in table]),
        mean_remaining=np.array([row[2] for row in table]),
        composite=np.array([row[3] for row in table]),
    )
    return rows, answers


@given(
    st.lists(
        st.tuples(
            st.integers(1, 20), st.floats(0, 1), st.floats(1, HORIZON), st.integers(1, HORIZON)
        ),
        min_size=1,
        max_size=20,
    )
)
def test_scores_are_means_over_the_rows(table: list[tuple[int, float, float, int]]) -> None:
    found = scores_of(*rows_and_answers(table))
    ended = [row for row in table if row[0] <= HORIZON]
    assert found.rows == len(table)
    assert found.base_rate == pytest.approx(len(ended) / len(table))
    squares = [(p - (remaining <= HORIZON)) ** 2 for remaining, p, _, _ in table]
    assert found.brier == pytest.approx(sum(squares) / len(table))
    if ended:
        off = [abs(mean - remaining) for remaining, _, mean, _ in ended]
        assert found.mae == pytest.approx(sum(off) / len(ended))
    else:
        assert isnan(found.mae)
    composite_off = [abs(steps - min(remaining, HORIZON)) for remaining, _, _, steps in table]
    assert found.composite_mae == pytest.approx(sum(composite_off) / len(table))
    if 0 < len(ended) < len(table):
        pairs = [
            float(mine[1] > other[1]) + float(mine[1] == other[1]) / 2
            for mine in ended
            for other in table
            if other[0] > HORIZON
        ]
        assert found.auc == pytest.approx(sum(pairs) / len(pairs))
    else:
        assert isnan(found.auc)


def drawn(seed: int, count: int = 300) -> list[PastRequest]:
    """Return requests of two kinds, told apart by their prompts: short answers and long ones."""
    rng = random.Random(seed)
    past = []
    for number in range(count):
        short = rng.random() < 0.5
        output = rng.randint(5, 30) if short else rng.randint(60, 120)
        features = RequestFeatures(10 if short else 1_000)
        past.append(PastRequest(number * 0.2, number * 0.2 + output * 0.05, features, output))
    return past


def judged(past: list[PastRequest], *, learn: bool = True) -> dict[str, PredictorJudgement]:
    predictors: dict[str, Predictor] = {
        "none": NoPrediction(),
        "survival": Survival(request.output_tokens for request in drawn(0)),
        "misled": Survival([500] * 50),
    }
    replay = Replay(past, horizon_steps=40)
    return judge(replay, predictors, baseline="survival", learn=learn)


def test_a_better_predictor_has_gains_far_above_their_error() -> None:
    found = judged(drawn(1), learn=False)
    assert list(found) == ["none", "survival", "misled"]
    for name in ("none", "misled"):
        for gain in found[name].gains.values():
            assert gain.value < -4 * gain.error < 0
    for gain in found["survival"].gains.values():
        assert (gain.value, gain.error) == (0.0, 0.0)


def test_a_gain_is_the_difference_of_the_scores() -> None:
    found = judged(drawn(1))
    baseline = found["survival"].scores
    for judgement in found.values():
        mine = judgement.scores
        assert tuple(judgement.gains) == GAINS
        assert judgement.gains["auc"].value == pytest.approx(mine.auc - baseline.auc)
        assert judgement.gains["brier"].value == pytest.approx(baseline.brier - mine.brier)
        assert judgement.gains["mae"].value == pytest.approx(baseline.mae - mine.mae)


def test_learning_on_the_way_mends_what_was_wrong() -> None:
    frozen, learning = judged(drawn(1), learn=False), judged(drawn(1))
    assert learning["misled"].scores.brier < frozen["misled"].scores.brier - 0.05


def test_the_error_is_that_of_other_draws() -> None:
    values, errors = [], []
    for seed in range(2, 26):
        gain = judged(drawn(seed), learn=False)["none"].gains["brier"]
        values.append(gain.value)
        errors.append(gain.error)
    assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.4)


def test_of_a_single_request_no_error_is_known() -> None:
    (gain, *_) = judged(drawn(1, count=1))["none"].gains.values()
    assert isnan(gain.error)


def test_progress_names_the_predictor() -> None:
    told: list[tuple[str, float]] = []
    predictors = {"one": NoPrediction(), "other": NoPrediction()}
    judge(
        Replay(drawn(1, count=5)),
        predictors,
        baseline="one",
        progress=lambda name, share: told.append((name, share)),
    )
    assert [name for name, share in told if share == 1.0] == ["one", "other"]


# Scores against their definitions, counted pair by pair and row by row.


# Few levels, so that ties are common.
levels = st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.30000000000000004, 0.5, 0.7, 0.999, 1.0])
tables = st.lists(st.tuples(levels, st.booleans()), min_size=1, max_size=40)
Table = list[tuple[float, bool]]


def columns(table: Table) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    return np.array([p for p, _ in table]), np.array([y for _, y in table], np.bool_)


@given(tables)
def test_the_auc_counts_the_pairs_in_the_right_order(table: Table) -> None:
    came_true = [p for p, y in table if y]
    did_not = [p for p, y in table if not y]
    won = [float(p > q) + 0.5 * float(p == q) for p in came_true for q in did_not]
    auc = measures.roc_auc(*columns(table))
    assert auc == pytest.approx(sum(won) / len(won)) if won else isnan(auc)


def test_the_auc_of_the_same_answer_to_all_is_one_half() -> None:
    assert measures.roc_auc(np.full(5, 0.2), np.array([True, False, True, True, False])) == 0.5


@given(tables)
def test_the_area_under_the_curve_is_the_auc(table: Table) -> None:
    predicted, happened = columns(table)
    if happened.all() or not happened.any():
        return
    false_rate, true_rate = measures.roc_curve(predicted, happened)
    assert (false_rate[0], true_rate[0]) == (0.0, 0.0)
    assert (false_rate[-1], true_rate[-1]) == (1.0, 1.0)
    assert len(false_rate) == len(set(predicted.tolist())) + 1
    area = (np.diff(false_rate) * (true_rate[1:] + true_rate[:-1]) / 2).sum()
    assert area == pytest.approx(measures.roc_auc(predicted, happened))


@given(tables)
def test_a_point_of_the_curve_is_a_threshold(table: Table) -> None:
    predicted, happened = columns(table)
    if happened.all() or not happened.any():
        return
    points = list(zip(*measures.roc_curve(predicted, happened), strict=True))
    for threshold, point in zip(sorted(set(predicted), reverse=True), points[1:], strict=True):
        alarm = predicted >= threshold
        assert point == pytest.approx((alarm[~happened].mean(), alarm[happened].mean()))


@given(tables)
def test_the_brier_score_is_the_mean_squared_error(table: Table) -> None:
    expected = sum((p - y) ** 2 for p, y in table) / len(table)
    assert measures.brier(*columns(table)) == pytest.approx(expected)


@given(tables, st.integers(1, 12))
def test_a_bin_holds_the_rows_between_its_edges(table: Table, bins: int) -> None:
    diagram = measures.reliability(*columns(table), bins=bins)
    edges = np.linspace(0.0, 1.0, bins + 1).tolist()
    gaps = 0.0
    for number in range(bins):
        last = number == bins - 1
        rows = [
            (p, y)
            for p, y in table
            if edges[number] <= p and (p < edges[number + 1] or (last and p == 1.0))
        ]
        assert diagram.rows[number] == len(rows)
        if not rows:
            assert isnan(diagram.predicted[number])
            assert isnan(diagram.observed[number])
            continue
        predicted = sum(p for p, _ in rows) / len(rows)
        observed = sum(y for _, y in rows) / len(rows)
        assert diagram.predicted[number] == pytest.approx(predicted)
        assert diagram.observed[number] == pytest.approx(observed)
        gaps += len(rows) * abs(predicted - observed)
    assert diagram.rows.sum() == len(table)
    assert measures.expected_calibration_error(diagram) == pytest.approx(gaps / len(table))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=30),
    st.sets(st.integers(1, 50), max_size=5),
)
def test_a_band_has_the_mean_of_its_values(
    table: list[tuple[float, int]], begins: set[int]
) -> None:
    edges = [0, *sorted(begins)]
    values, at = np.array([v for v, _ in table]), np.array([a for _, a in table], np.int64)
    means, rows = measures.mean_by_band(values, at, np.array(edges))
    assert len(means) == len(rows) == len(edges)
    for number, begin in enumerate(edges):
        end = edges[number + 1] if number + 1 < len(edges) else 10**9
        inside = [v for v, a in table if begin <= a < end]
        assert rows[number] == len(inside)
        assert (
            means[number] == pytest.approx(sum(inside) / len(inside))
            if inside
            else isnan(means[number])
        )


def test_the_mean_of_chosen_values() -> None:
    values = np.array([1.0, 5.0, 9.0])
    assert measures.mean_where(values) == 5.0
    assert measures.mean_where(values, np.array([True, False, False])) == 1.0


def test_scores_of_nothing_are_undefined() -> None:
    nothing, never = np.empty(0), np.empty(0, np.bool_)
    assert isnan(measures.roc_auc(nothing, never))
    assert isnan(measures.brier(nothing, never))
    assert isnan(measures.expected_calibration_error(measures.reliability(nothing, never)))
    assert isnan(measures.mean_where(np.ones(2), np.zeros(2, np.bool_)))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.integers(1, 4))
def test_the_error_of_a_mean_is_that_of_the_means_of_equal_blocks(
    means: list[float], rows_each: int
) -> None:
    values = np.repeat(means, rows_each)
    block = np.repeat(np.arange(len(means)), rows_each)
    error = evaluation.jackknife_error(lambda mask: measures.mean_where(values, mask), block)
    expected = float(np.std(means, ddof=1)) / sqrt(len(means))
    assert error == pytest.approx(expected, abs=1e-9)


def test_the_error_is_undefined_with_one_block_or_where_the_statistic_is() -> None:
    values, happened = np.array([0.1, 0.9, 0.4]), np.array([False, True, False])
    assert isnan(
        evaluation.jackknife_error(
            lambda mask: measures.mean_where(values, mask), np.zeros(3, np.int64)
        )
    )

    def auc(mask: NDArray[np.bool_]) -> float:
        return measures.roc_auc(values[mask], happened[mask])

    assert isnan(evaluation.jackknife_error(auc, np.arange(3)))


def test_the_error_tells_how_far_samples_spread() -> None:
    # 200 samples of an AUC of correlated rows, ten rows a block: their spread is the error.
    rng = np.random.default_rng(3)
    found, errors = [], []
    for _ in range(200):
        block = np.repeat(np.arange(30), 10)
        happened = rng.random(300) < 0.4
        common = rng.normal(size=30)[block]
        predicted = happened + common + rng.normal(size=300)

        def auc(
            mask: NDArray[np.bool_],
            predicted: NDArray[np.float64] = predicted,
            happened: NDArray[np.bool_] = happened,
        ) -> float:
            return measures.roc_auc(predicted[mask], happened[mask])

        found.append(auc(np.ones(300, np.bool_)))
        errors.append(evaluation.jackknife_error(auc, block))
    assert np.mean(errors) == pytest.approx(np.std(found, ddof=1), rel=0.15)


# The replay asks every question once, in the order of time, and tells nothing of the future.


def past_request(arrival_s: float, duration_s: float, output_tokens: int) -> PastRequest:
    # The prompt's length tells requests apart.
    features = RequestFeatures(round(1e6 * arrival_s) + output_tokens)
    return PastRequest(arrival_s, arrival_s + duration_s, features, output_tokens)


pasts = st.lists(
    st.builds(past_request, st.floats(0, 20), st.floats(0, 10), st.integers(1, 60)),
    min_size=1,
    max_size=12,
)


class Recorder(NoPrediction):
    """Notes what it is told and asked, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, RequestId, int]] = []
        self.batches: list[int] = []
        self.features: dict[RequestId, RequestFeatures] = {}

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        assert request not in self.features
        self.features[request] = features
        self.log.append(("begin", request, 0))

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        self.batches.append(len(requests))
        self.log += [
            ("ask", request, age) for request, age in zip(requests, ages.tolist(), strict=True)
        ]
        return super().survival(requests, ages, steps)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        self.log.append(("observe", request, output_tokens))

    def forget(self, request: RequestId) -> None:
        self.log.append(("forget", request, 0))


def time_of(past: Sequence[PastRequest], place: int, kind: str, age: int) -> float:
    request = past[place]
    if kind == "begin":
        return request.arrival_s
    if kind == "ask":
        span_s = request.finished_s - request.arrival_s
        return min(request.arrival_s + age * (span_s / request.output_tokens), request.finished_s)
    return request.finished_s


@given(pasts, st.integers(1, 25), st.sampled_from([1e-6, 0.05, 3.0]))
def test_the_replay_is_causal_and_complete(
    past: list[PastRequest], age_step: int, slice_s: float
) -> None:
    replay = Replay(past, age_step=age_step, slice_s=slice_s)
    recorder = Recorder()
    replay.ask(recorder)
    place_of = {request: number for number, request in enumerate(sorted(recorder.features))}
    by_arrival = sorted(past, key=lambda request: request.arrival_s)
    log = [(kind, place_of[request], number) for kind, request, number in recorder.log]
    # Each request begins once, is asked about at each age, and ends once.
    expected = [("begin", place, 0) for place in range(len(past))]
    for place, request in enumerate(by_arrival):
        expected += [("ask", place, age) for age in range(0, request.output_tokens, age_step)]
        expected.append(("observe", place, request.output_tokens))
    assert sorted(log) == sorted(expected)
    assert [recorder.features[request] for request in sorted(recorder.features)] == [
        request.features for request in by_arrival
    ]
    # By slices; in a slice begins, questions, ends; each in the order of time.
    ranks = {"begin": 0, "ask": 1, "observe": 2}
    times = [time_of(by_arrival, place, kind, number) for kind, place, number in log]
    keys = [
        (floor(time / slice_s), ranks[kind], time)
        for time, (kind, _, _) in zip(times, log, strict=True)
    ]
    assert keys == sorted(keys)
    # So nobody hears of an end before a question of an earlier time, or a slice late.
    for place, (kind, _, _) in enumerate(log):
        if kind == "observe":
            assert all(
                time >= times[place]
                for time, other in zip(times[place:], log[place:], strict=True)
                if other[0] == "ask"
            )
            assert all(
                time < times[place] + slice_s
                for time, other in zip(times[:place], log[:place], strict=True)
                if other[0] == "ask"
            )


@given(pasts, st.integers(1, 25), st.integers(1, 50))
def test_a_row_tells_what_came(past: list[PastRequest], age_step: int, horizon: int) -> None:
    replay = Replay(past, horizon_steps=horizon, age_step=age_step)
    rows, recorder = replay.rows, Recorder()
    replay.ask(recorder)
    asked = [age for kind, _, age in recorder.log if kind == "ask"]
    assert rows.age.tolist() == asked
    outputs = np.array([request.output_tokens for request in replay.past])
    assert (rows.remaining == outputs[rows.request] - rows.age).all()
    assert (rows.remaining >= 1).all()
    assert (rows.finishes == (rows.remaining <= horizon)).all()


@given(pasts, st.integers(1, 50))
def test_the_oracle_is_right_on_every_row(past: list[PastRequest], horizon: int) -> None:
    replay = Replay(past, horizon_steps=horizon)
    recorder = Recorder()
    replay.ask(recorder)
    numbers = sorted(recorder.features)
    oracle = Oracle(
        {
            number: request.output_tokens
            for number, request in zip(numbers, replay.past, strict=True)
        }
    )
    answers = replay.ask(oracle)
    rows = replay.rows
    assert (answers.p_finish == rows.finishes).all()
    assert answers.mean_remaining[rows.finishes] == pytest.approx(rows.remaining[rows.finishes])
    assert (answers.composite == np.minimum(rows.remaining, horizon)).all()


@given(pasts, st.floats(0, 30))
def test_from_a_moment_on_only_its_questions_are_asked(
    past: list[PastRequest], from_s: float
) -> None:
    everything = Replay(past, age_step=3)
    times = [
        time_of(everything.past, place, "ask", age)
        for place, age in zip(
            everything.rows.request.tolist(), everything.rows.age.tolist(), strict=True
        )
    ]
    late = [time >= from_s for time in times]
    if not any(late):
        with pytest.raises(ConfigError, match="no requests to judge"):
            Replay(past, age_step=3, from_s=from_s)
        return
    replay, recorder = Replay(past, age_step=3, from_s=from_s), Recorder()
    replay.ask(recorder)
    asked = zip(replay.rows.request.tolist(), replay.rows.age.tolist(), strict=True)
    wanted = zip(everything.rows.request[late], everything.rows.age[late], strict=True)
    assert sorted(asked) == sorted((int(place), int(age)) for place, age in wanted)
    # All the requests are told nevertheless.
    assert sum(kind == "begin" for kind, _, _ in recorder.log) == len(past)
    assert sum(kind == "observe" for kind, _, _ in recorder.log) == len(past)


def test_the_questions_of_a_slice_are_one_batch() -> None:
    # Two requests in step with each other, a question a second each.
    past = [past_request(0.0, 3.0, 60), past_request(0.01, 3.0, 60)]
    for slice_s, batches in ((0.1, [2, 2, 2]), (0.001, [1] * 6), (10.0, [6])):
        recorder = Recorder()
        Replay(past, age_step=20, slice_s=slice_s).ask(recorder)
        assert recorder.batches == batches


def test_a_frozen_predictor_hears_of_no_length() -> None:
    recorder = Recorder()
    Replay([past_request(0, 1, 30), past_request(0.5, 1, 3)]).ask(recorder, learn=False)
    kinds = [kind for kind, _, _ in recorder.log]
    assert kinds.count("forget") == 2
    assert "observe" not in kinds


def test_the_requests_have_numbers_that_no_proxy_reaches() -> None:
    recorder = Recorder()
    Replay([past_request(0, 1, 30)]).ask(recorder)
    assert min(recorder.features) >= 1 << 48


def test_progress_ends_at_all_of_the_rows() -> None:
    shares: list[float] = []
    past = [past_request(second, 1, 30) for second in range(5)]
    Replay(past).ask(NoPrediction(), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        np.ones((1, 40)),
        np.full((1, 41), 0.5),
        np.linspace(1.0, 1.5, 41)[None],
        np.concatenate([np.linspace(1.0, 0.5, 40), [0.6]])[None],
        np.linspace(1.0, -0.5, 41)[None],
        np.array([[1.0] + [np.nan] * 40]),
    ],
    ids=["short", "not 1 at first", "above 1", "rising", "negative", "nan"],
)
def test_an_answer_that_is_no_survival_is_a_fault(answer: NDArray[np.float64]) -> None:
    class Wrong(NoPrediction):
        def survival(self, *_: object) -> NDArray[np.float64]:
            return answer

    with pytest.raises(PredictorError, match="survival "):
        Replay([past_request(0, 1, 30)]).ask(Wrong())


@given(pasts, st.floats(0.01, 0.99))
def test_a_cut_leaves_to_learn_from_only_what_had_ended(
    past: list[PastRequest], share: float
) -> None:
    place = round(share * len(past))
    ordered = sorted(past, key=lambda request: request.arrival_s)
    if not 0 < place < len(past) or all(
        request.finished_s > ordered[place].arrival_s for request in past
    ):
        with pytest.raises(ConfigError):
            cut_in_time(past, share)
        return
    cut = cut_in_time(past, share)
    assert sorted(map(repr, cut.before + cut.after)) == sorted(map(repr, past))
    assert all(request.finished_s <= cut.at_s for request in cut.before)
    assert all(request.finished_s > cut.at_s for request in cut.after)
    arrivals = [request.arrival_s for request in cut.after]
    assert arrivals == sorted(arrivals)


def test_a_cut_is_at_the_arrival_that_completes_the_share() -> None:
    past = [past_request(second, 0.5 if second else 5.0, 3) for second in range(4)]
    cut = cut_in_time(past, 0.5)
    assert cut.at_s == 2.0
    assert [request.arrival_s for request in cut.before] == [1.0]
    # The first request still runs.
    assert [request.arrival_s for request in cut.after] == [0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("past", "share", "words"),
    [
        ([past_request(0, 1, 1)], 0.5, "1 requests cannot be cut at 0.5 of them"),
        ([past_request(second, 1, 1) for second in range(5)], 0.01, "5 requests cannot be cut"),
        ([past_request(second, 9, 1) for second in range(4)], 0.5, "none of 4 requests had ended"),
    ],
)
def test_a_cut_with_an_empty_side_is_refused(
    past: list[PastRequest], share: float, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cut_in_time(past, share)


def test_blocks_are_of_requests_that_follow_each_other() -> None:
    replay = Replay([past_request(second, 1, 50) for second in range(40)])
    blocks, requests = replay.blocks(4), replay.rows.request
    assert blocks.tolist() == (requests // 10).tolist()
    assert set(replay.blocks(100).tolist()) == set(range(20))
    alone = Replay([past_request(0, 1, 50)])
    assert set(alone.blocks().tolist()) == {0}


# The table of all predictors on all public traces is one command, and this is it.


table = script("reproduce.predictors")


def test_a_row_for_each_predictor_and_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run_script("reproduce predictor-table --requests 1000") == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(head.split("|")) == len(table.COLUMNS) + 2
    assert len(rows) == 9
    assert len({row[0] for row in rows}) == 3
    assert {row[1].strip("`") for row in rows} == set(KINDS)
    for row in rows:
        assert len(row) == len(table.COLUMNS)
        assert 0.0 < float(row[3]) < 0.25
        # A difference, and its standard error.
        assert [bool(re.fullmatch(r"[+−]?[\d.]+ ±[\d.]+", cell)) for cell in row[6:]] == [
            row[1] != f"`{table.BASELINE}`"
        ] * 3


def test_there_are_three_kinds_of_predictors() -> None:
    assert set(KINDS) == {"survival", "exact-match", "gbdt"}
