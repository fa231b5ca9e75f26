"""The predictor in use and its shadows: who is asked, who is told, who is judged."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.predictors import RequestFeatures, Survival
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.files import load, save
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, Savable, State
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.prediction import NamedPredictor, PredictorSet
from balanceroute.proxy.live.predictor_state import PredictorStateFile

H = 10


class Certain:
    """Predicts that every request ends at one age, and notes what it is told."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.told: list[tuple[Any, ...]] = []
        self.asked: list[tuple[list[int], list[int], int]] = []
        self.broken = False

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        self._tell("begin", request, features)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        self._tell("observe", request, output_tokens)

    def forget(self, request: RequestId) -> None:
        self._tell("forget", request)

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        if self.broken:
            raise ZeroDivisionError
        self.asked.append((list(requests), ages.tolist(), steps))
        alive = ages[:, None] + np.arange(steps + 1) < self.end
        alive[:, 0] = True
        return alive.astype(np.float64)

    def _tell(self, *words: Any) -> None:
        if self.broken:
            raise ZeroDivisionError
        self.told.append(words)


class Counts:
    """Takes the place of the metrics."""

    def __init__(self) -> None:
        self.refreshes: list[tuple[int, float]] = []
        self.errors: list[float] = []
        self.scorings: list[float] = []

    def refreshed(self, count: int, seconds: float) -> None:
        self.refreshes.append((count, seconds))

    def error(self, abs_tokens: float) -> None:
        self.errors.append(abs_tokens)

    def scored(self, seconds: float) -> None:
        self.scorings.append(seconds)


class Subject:
    """A set of predictors that say when requests end, and what they tell."""

    def __init__(self, *ends: int, uses_keys: Sequence[bool] = ()) -> None:
        times = iter(range(10_000))
        self.counts = Counts()
        self.predictors = [Certain(end) for end in ends]
        keys = uses_keys or [False] * len(ends)
        named = [NamedPredictor(f"p{i}", one, keys[i]) for i, one in enumerate(self.predictors)]
        self.failures: list[tuple[str, Exception]] = []
        self.set = PredictorSet(
            named[0],
            named[1:],
            horizon_steps=H,
            metrics=self.counts,  # type: ignore[arg-type]
            on_failure=lambda what, error: self.failures.append((what, error)),
            stopwatch=lambda: float(next(times)),
        )

    def score(self, ages: dict[int, int]) -> None:
        self.set.score(map(RequestId, ages), lambda request: ages[request])

    def end(self, request: int, output_tokens: int, *, by_itself: bool = True) -> None:
        self.set.ended(RequestId(request), output_tokens, by_itself=by_itself)


def test_the_core_gets_the_active_predictors_answer_and_its_cost_is_told() -> None:
    subject = Subject(5, 7)
    active, shadow = subject.predictors
    ages = np.array([0, 3])
    answer = subject.set.survival([RequestId(1), RequestId(2)], ages, 4)
    assert np.array_equal(answer, active.survival([RequestId(1), RequestId(2)], ages, 4))
    assert subject.counts.refreshes == []
    subject.set.report_refreshes()
    subject.set.report_refreshes()
    assert subject.counts.refreshes == [(2, 1.0)]
    assert shadow.asked == []


def test_all_are_told_of_begins_and_ends() -> None:
    subject = Subject(5, 7, 9)
    features = RequestFeatures(30, 20, (1, 2))
    subject.set.begin(RequestId(1), features)
    subject.end(1, 6)
    subject.end(2, 6, by_itself=False)
    for one in subject.predictors:
        assert one.told == [("begin", 1, features), ("observe", 1, 6), ("forget", 2)]
    assert subject.set.observed == 1


def test_an_output_that_cannot_be_is_not_learned() -> None:
    subject = Subject(5)
    subject.end(1, MAX_OUTPUT_TOKENS + 1)
    subject.end(2, 0)
    subject.end(3, MAX_OUTPUT_TOKENS)
    assert [words[0] for words in subject.predictors[0].told] == ["forget", "forget", "observe"]


def test_all_are_asked_the_same_in_one_batch_and_judged_by_it() -> None:
    subject = Subject(5, 8)
    subject.score({1: 0, 2: 4})
    for one in subject.predictors:
        assert one.asked == [([1, 2], [0, 4], H)]
    assert subject.counts.scorings == [1.0]
    subject.score({1: 3, 2: 7})  # Both have rows.
    assert len(subject.predictors[0].asked) == 1
    assert subject.counts.scorings == [1.0]
    subject.end(1, 5)
    subject.end(2, 8)
    first, second = subject.set.scores()
    assert (first.name, first.active, first.rows) == ("p0", True, 2)
    assert (second.name, second.active, second.rows) == ("p1", False, 2)
    assert (first.mae, second.mae) == (1.5, 1.5)
    # Of the active one alone.
    assert subject.counts.errors == [0.0, 3.0]
    assert subject.set.judged == 2


def test_scores_are_made_anew_only_when_a_row_was_judged() -> None:
    subject = Subject(5)
    subject.score({1: 0, 2: 0})
    before = subject.set.scores()
    assert subject.set.scores() is before
    subject.end(1, 5)
    after = subject.set.scores()
    assert (before[0].rows, after[0].rows) == (0, 1)


def test_of_many_requests_some_are_asked_about_at_a_time_and_all_in_turn() -> None:
    subject = Subject(5)
    ages = dict.fromkeys(range(310), 3)
    for _ in range(13):
        subject.score(ages)
    batches = [requests for requests, _, _ in subject.predictors[0].asked]
    assert [len(batch) for batch in batches] == 12 * [25] + [10]
    assert sorted(chain.from_iterable(batches)) == list(range(310))
    # Now all have rows, and of a great many only some are looked at.
    looked: list[int] = []
    crowd = dict.fromkeys(range(1000), 3)

    def age_of(request: RequestId) -> int:
        looked.append(request)
        return 3

    subject.set.score(map(RequestId, crowd), age_of)
    assert len(looked) <= 100


def test_outlived_rows_are_judged_and_the_request_is_asked_about_again() -> None:
    subject = Subject(5)
    subject.score({1: 0})
    subject.score({1: H + 1})
    assert subject.set.judged == 1
    assert [ages for _, ages, _ in subject.predictors[0].asked] == [[0], [H + 1]]
    assert subject.counts.errors == [5.0]


@pytest.mark.parametrize("when", ["begin", "score", "observe", "forget"])
def test_a_shadow_that_breaks_hurts_nobody(when: str, caplog: pytest.LogCaptureFixture) -> None:
    subject = Subject(5, 6, 7)
    broken = subject.predictors[1]
    subject.score({1: 0, 2: 0})
    with caplog.at_level(logging.ERROR):
        broken.broken = True
        match when:
            case "begin":
                subject.set.begin(RequestId(3), RequestFeatures(1))
            case "score":
                subject.score({3: 0})
            case "observe":
                subject.end(1, 5)
            case _:
                subject.end(1, 5, by_itself=False)
    assert [record.fields for record in caplog.records] == [{"predictor": "p1"}]  # type: ignore[attr-defined]
    broken.broken = False
    told = len(broken.told)
    subject.score({4: 0})
    subject.end(2, 5)
    assert len(broken.told) == told
    first, failed, last = subject.set.scores()
    assert (first.failed, failed.failed, last.failed) == (False, True, False)
    assert (failed.rows, failed.brier) == (0, None)
    assert last.rows == first.rows > 0
    assert last.mae is not None


def test_keys_are_wanted_if_anybody_learns_by_them() -> None:
    assert not Subject(1, 2).set.uses_keys
    assert Subject(1, 2, uses_keys=[True, False]).set.uses_keys
    assert Subject(1, 2, uses_keys=[False, True]).set.uses_keys


@pytest.mark.parametrize(
    "answer",
    [np.full((1, H + 1), np.nan), np.full((1, H + 1), 1.5), -np.ones((1, H + 1)), np.ones((1, H))],
    ids=["nan", "above", "below", "short"],
)
def test_an_answer_that_is_no_probability_is_a_failure(answer: NDArray[np.float64]) -> None:
    subject = Subject(5, 7)
    active, shadow = subject.predictors
    for predictor in (active, shadow):
        predictor.survival = lambda *_: answer  # type: ignore[method-assign]
    said = subject.set.survival([RequestId(1)], np.array([0]), H)
    assert said.tolist() == [[1.0] * (H + 1)]
    subject.score({1: 0})
    assert [what for what, _ in subject.failures] == ["predictor"] * 2
    assert [one.failed for one in subject.set.scores()] == [True, True]


# The file that keeps what a predictor learns: refused, put aside, saved; and a disk that fails.


class KeptCounts:
    """Takes the place of the metrics."""

    def __init__(self) -> None:
        self.saves: list[bool] = []
        self.refusals = 0

    def state_saved(self, *, ok: bool) -> None:
        self.saves.append(ok)

    def state_refused(self) -> None:
        self.refusals += 1


class Disk:
    """Takes the place of the thread; writes at once, or the next time when told."""

    def __init__(self) -> None:
        self.slow: asyncio.Event | None = None
        self.writes = 0

    async def __call__(self, function: Callable[[], None]) -> None:
        slow, self.slow = self.slow, None
        if slow is not None:
            await slow.wait()
        self.writes += 1
        function()


class KeptSubject:
    """A keeper of one predictor."""

    def __init__(self, path: Path, fresh: Savable) -> None:
        self.counts = KeptCounts()
        self.disk = Disk()
        self.observed = 0
        self.keeper = PredictorStateFile(
            path,
            fresh,
            metrics=self.counts,  # type: ignore[arg-type]
            in_thread=self.disk,
            observed=lambda: self.observed,
        )

    def save(self) -> None:
        """Learn something and close."""
        self.observed += 1

        async def main(_: VirtualLoop) -> None:
            await self.keeper.close()

        run(main, seed=1, limit_s=10.0)


class Model(Survival):
    """A predictor with a model, as a trained one has."""

    text = "one"

    def state(self) -> State:
        plain = super().state()
        return State(plain.kind, plain.fields, {"model": self.text})


class OtherModel(Model):
    """One with another model."""

    text = "another"


class Silent(Survival):
    """A predictor that does not tell what it has learned."""

    def state(self) -> State:
        raise ZeroDivisionError


def test_without_a_file_the_predictor_begins_afresh(tmp_path: Path) -> None:
    fresh = Survival([4])
    subject = KeptSubject(tmp_path / "s.json", fresh)
    assert subject.keeper.predictor is fresh
    assert subject.counts.refusals == 0


def test_what_is_there_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    save(path, Survival([5, 6]))
    subject = KeptSubject(path, Survival([4]))
    assert subject.keeper.predictor.state() == Survival([5, 6]).state()
    assert subject.counts.refusals == 0


def damaged(path: Path) -> None:
    save(path, Survival([5, 6]))
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.touch()


def foreign(path: Path) -> None:
    save(path, ExactMatch())


def absurd(path: Path) -> None:
    save(path, Survival([5]))
    path.write_text(path.read_text().replace("[5]", '["5"]'))


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damaged, "not JSON, or cut off"),
        (empty, "not JSON, or cut off"),
        (foreign, "is of kind 'exact-match', not 'survival'"),
        (absurd, "'history' must hold integers only"),
        (folder, "not a regular file"),
        (dangling, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_used_is_told_and_put_aside_when_there_is_something_better(
    spoil: Callable[[Path], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.json"
    spoil(path)
    fresh = Survival([4])
    with caplog.at_level(logging.ERROR):
        subject = KeptSubject(path, fresh)
    assert subject.keeper.predictor is fresh
    assert subject.counts.refusals == 1
    (record,) = caplog.records
    fields: dict[str, str] = record.fields  # type: ignore[attr-defined]
    assert fields["path"] == str(path)
    assert reason in fields["reason"]
    assert [one.name for one in tmp_path.iterdir()] == ["s.json"]
    subject.save()
    assert subject.counts.saves == [True]
    assert load(path).state() == fresh.state()
    assert (tmp_path / "s.json.bad").exists() or (tmp_path / "s.json.bad").is_symlink()


def test_only_a_refused_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    empty(path)
    subject = KeptSubject(path, Survival([4]))
    subject.save()
    (tmp_path / "s.json.bad").unlink()
    subject.save()
    assert [one.name for one in tmp_path.iterdir()] == ["s.json"]


def test_a_state_of_another_model_is_not_mixed_with_the_one_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    save(path, Model([5]))
    assert KeptSubject(path, Model([4])).keeper.predictor.state().fields["history"] == [5]
    subject = KeptSubject(path, OtherModel([4]))
    assert subject.keeper.predictor.state().fields["history"] == [4]
    assert subject.counts.refusals == 1


def test_nothing_new_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    subject = KeptSubject(path, Survival([4]))

    async def main(_: VirtualLoop) -> None:
        await subject.keeper.close()
        assert subject.disk.writes == 0
        subject.observed = 3
        await subject.keeper.close()
        await subject.keeper.close()

    run(main, seed=1, limit_s=10.0)
    assert subject.disk.writes == 1


def test_a_failed_save_is_told_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone" / "s.json"
    subject = KeptSubject(path, Survival([4]))
    with caplog.at_level(logging.ERROR):
        subject.save()
    assert subject.counts.saves == [False]
    (record,) = caplog.records
    assert not record.exc_info
    assert "No such file" in record.fields["reason"]  # type: ignore[attr-defined]
    path.parent.mkdir()
    subject.observed -= 1  # Nothing came meanwhile.
    subject.save()
    assert subject.counts.saves == [False, True]
    assert load(path).state() == Survival([4]).state()


def test_a_file_that_cannot_be_put_aside_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    empty(path)
    subject = KeptSubject(path, Survival([4]))
    (tmp_path / "s.json.bad").mkdir()
    subject.save()
    assert subject.counts.saves == [False]
    assert path.read_bytes() == b""


def test_a_predictor_that_breaks_while_it_is_saved_is_told_with_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = KeptSubject(tmp_path / "s.json", Silent([4]))
    with caplog.at_level(logging.ERROR):
        subject.save()
    assert subject.counts.saves == [False]
    assert caplog.records[0].exc_info


def test_the_last_save_waits_for_the_one_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    predictor = Survival([4])
    subject = KeptSubject(path, predictor)

    async def main(_: VirtualLoop) -> None:
        slow = subject.disk.slow = asyncio.Event()
        subject.observed = 1
        task = asyncio.ensure_future(subject.keeper.run())
        await asyncio.sleep(60.5)
        predictor.observe(0, 9)  # type: ignore[arg-type]
        subject.observed = 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        closing = asyncio.ensure_future(subject.keeper.close())
        await asyncio.sleep(1.0)
        assert subject.disk.writes == 0
        slow.set()
        await closing

    run(main, seed=1, limit_s=100.0)
    assert subject.disk.writes == 2
    assert load(path).state() == Survival([4, 9]).state()
