"""Who leads by a lock on a file."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.live.leader.candidates import Election, Scenario, elect

Play = Callable[[Scenario], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return lambda scenario: elect(scenario, tmp_path)


def test_one_of_two_leads_and_the_other_takes_over_at_once(play: Play) -> None:
    async def scenario(election: Election) -> None:
        for name in "abc":
            election.stand(name, lock=True)
        # A new file may have replaced one that is locked still.
        assert await election.until(lambda: bool(election.leaders)) > 2.9
        for _ in range(4):
            leader = await election.leader()
            await asyncio.sleep(7.0)
            assert election.leaders == [leader.name]
            other = next(one for one in election.candidates if one is not leader)
            assert other.leadership.forbids() == f"follower of {leader.name}"
            await leader.kill()
            election.candidates.remove(leader)
            assert await election.until(lambda: bool(election.leaders)) < 0.7
            election.stand(f"{leader.name}+", lock=True)
            await asyncio.sleep(3.0)

    play(scenario)


def test_who_leaves_gives_it_up(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a", lock=True), election.stand("b", lock=True)
        leader = await election.leader()
        await leader.leadership.retire()
        assert await election.until(lambda: election.other(leader).leads) < 0.7

    play(scenario)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_taken_away_makes_no_two_leaders(play: Play, how: str) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a", lock=True), election.stand("b", lock=True)
        path = election.folder / "leader"
        await election.leader()
        for pause_s in (0.9, 1.0, 1.13):
            await asyncio.sleep(pause_s)
            if how == "deleted":
                path.unlink()
            else:
                (election.folder / "new").write_text("x")
                (election.folder / "new").replace(path)
            await election.until(lambda: not election.leaders, limit_s=1.0)
            await election.until(lambda: bool(election.leaders), limit_s=5.0)

    play(scenario)


def test_a_leader_that_stops_keeps_the_lock(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a", lock=True), election.stand("b", lock=True)
        leader = await election.leader()
        leader.stop_for(30.0)
        await asyncio.sleep(29.0)
        assert not election.leaders
        await election.until(lambda: leader.leads)

    play(scenario)


def test_what_the_file_says_is_shown_with_care(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a", lock=True), election.stand("b", lock=True)
        leader = await election.leader()
        other = election.other(leader)
        path = election.folder / "leader"
        for said in (b"", b"\x00\xff\x1b[31m\r\nx", b"y" * 10_000):
            path.write_bytes(said)
            told = other.leadership.state().leader
            while other.leadership.state().leader == told:
                path.write_bytes(said)
                await asyncio.sleep(0.05)
            assert other.leadership.forbids().isprintable()
            assert len(other.leadership.forbids()) < 300
        assert election.leaders == [leader.name]

    play(scenario)


def test_a_folder_that_is_gone_ends_the_lead(play: Play, tmp_path: Path) -> None:
    async def scenario(election: Election) -> None:
        election.folder = tmp_path / "shared"
        election.folder.mkdir()
        election.stand("a", lock=True), election.stand("b", lock=True)
        await election.leader()
        os.rename(election.folder, tmp_path / "away")
        await election.until(lambda: not election.leaders, limit_s=3.0)
        await asyncio.sleep(10.0)
        assert not election.leaders
        os.rename(tmp_path / "away", election.folder)
        await election.until(lambda: bool(election.leaders), limit_s=5.0)

    play(scenario)
