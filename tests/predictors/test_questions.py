"""The replay asks every question once, in the order of time, and tells nothing of the future."""

from collections.abc import Sequence
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import NoPrediction, Oracle, PastRequest, RequestFeatures
from balanceroute.predictors.evaluation import Replay, cut_in_time
from balanceroute.proxy.core.errors import ConfigError, PredictorError
from balanceroute.proxy.core.events import RequestId


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
