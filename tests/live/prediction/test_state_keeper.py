"""The file that keeps what a predictor learns: refused, put aside, saved; and a disk that fails."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.predictors import Survival
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.files import load, save
from balanceroute.predictors.state import Savable, State
from balanceroute.proxy.live.prediction import StateKeeper


class Counts:
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


class Subject:
    """A keeper of one predictor."""

    def __init__(self, path: Path, fresh: Savable) -> None:
        self.counts = Counts()
        self.disk = Disk()
        self.observed = 0
        self.keeper = StateKeeper(
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
    subject = Subject(tmp_path / "s.json", fresh)
    assert subject.keeper.predictor is fresh
    assert subject.counts.refusals == 0


def test_what_is_there_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    save(path, Survival([5, 6]))
    subject = Subject(path, Survival([4]))
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
        subject = Subject(path, fresh)
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
    subject = Subject(path, Survival([4]))
    subject.save()
    (tmp_path / "s.json.bad").unlink()
    subject.save()
    assert [one.name for one in tmp_path.iterdir()] == ["s.json"]


def test_a_state_of_another_model_is_not_mixed_with_the_one_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    save(path, Model([5]))
    assert Subject(path, Model([4])).keeper.predictor.state().fields["history"] == [5]
    subject = Subject(path, OtherModel([4]))
    assert subject.keeper.predictor.state().fields["history"] == [4]
    assert subject.counts.refusals == 1


def test_nothing_new_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    subject = Subject(path, Survival([4]))

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
    subject = Subject(path, Survival([4]))
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
    subject = Subject(path, Survival([4]))
    (tmp_path / "s.json.bad").mkdir()
    subject.save()
    assert subject.counts.saves == [False]
    assert path.read_bytes() == b""


def test_a_predictor_that_breaks_while_it_is_saved_is_told_with_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Subject(tmp_path / "s.json", Silent([4]))
    with caplog.at_level(logging.ERROR):
        subject.save()
    assert subject.counts.saves == [False]
    assert caplog.records[0].exc_info


def test_the_last_save_waits_for_the_one_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    predictor = Survival([4])
    subject = Subject(path, predictor)

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
