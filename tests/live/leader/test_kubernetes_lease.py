"""Who leads by a Lease: one at a time, whatever becomes of clocks, processes, the server and the Lease."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tests.live.leader.candidates import LEASE_S, Election, Scenario, elect
from tests.live.leader.lease_server import LeaseServer

Play = Callable[[Scenario], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return lambda scenario: elect(scenario, tmp_path)


def test_one_of_two_leads_and_renews(play: Play) -> None:
    async def scenario(election: Election) -> None:
        a, b = election.stand("a"), election.stand("b")
        first = await election.leader()
        await asyncio.sleep(60.0)
        assert election.leaders == [first.name]
        assert first.leadership.state().began == 1
        assert first.leadership.state().age_s < 1.0
        assert election.server.holder == first.name
        assert election.server.spec["leaseTransitions"] == 1
        assert election.server.spec["leaseDurationSeconds"] == LEASE_S
        follower = b if first is a else a
        assert follower.leadership.forbids() == f"follower of {first.name}"

    play(scenario)


def test_who_follows_takes_over_from_one_that_is_killed(play: Play) -> None:
    async def scenario(election: Election) -> None:
        for name in "abc":
            election.stand(name)
        for turn in range(2, 6):
            leader = await election.leader()
            await asyncio.sleep(1.3 * turn)
            await leader.kill()
            election.candidates.remove(leader)
            took_s = await election.until(lambda: bool(election.leaders))
            # Others wait a whole duration, and look often.
            assert 2.0 < took_s < 4.0
            assert election.server.spec["leaseTransitions"] == turn
            election.stand(f"{leader.name}{turn}")

    play(scenario)


def test_who_leaves_gives_it_up(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        for _ in range(5):
            leader = await election.leader()
            other = election.other(leader)
            await leader.leadership.retire()
            assert "shutting down" in leader.leadership.forbids()
            assert await election.until(lambda: other.leads) < 0.7  # noqa: B023
            await leader.kill()
            election.candidates.remove(leader)
            election.stand(f"{leader.name}+")

    play(scenario)


@pytest.mark.parametrize("stop_s", [1.0, 2.1, 2.5, 4.1, 20.0])
def test_a_stopped_leader_decides_nothing_before_it_has_renewed(play: Play, stop_s: float) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        other = election.other(leader)
        await asyncio.sleep(5.0)
        renewals = len(election.server.requests)
        leader.stop_for(stop_s)
        await asyncio.sleep(stop_s + 1e-4)
        if stop_s > 2.0:
            assert not leader.leads
        if stop_s > 4.0:
            assert other.leads
        await asyncio.sleep(5.0)
        assert len(election.server.requests) > renewals
        assert election.leaders == [other.name if stop_s > 4.0 else leader.name]

    play(scenario)


@pytest.mark.parametrize("jump_s", [-1e9, -3600.0, 3600.0, 1e9, 1e30])
def test_wall_clocks_do_not_count(play: Play, jump_s: float) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        for _ in range(20):
            election.wall_s = jump_s - election.wall_s
            await asyncio.sleep(1.7)
            assert election.leaders == [leader.name]
        await leader.kill()
        election.candidates.remove(leader)
        assert await election.until(lambda: bool(election.leaders)) < 4.0

    play(scenario)


def _gone(server: LeaseServer) -> None:
    server.silent = True


def _fails(status: int) -> Callable[[LeaseServer], None]:
    return lambda server: setattr(server, "failure", status)


def _says(answer: object) -> Callable[[LeaseServer], None]:
    words = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return lambda server: setattr(server, "answer", words)


@pytest.mark.parametrize(
    "trouble",
    [
        _gone,
        *map(_fails, (301, 401, 403, 404, 409, 410, 429, 500, 503)),
        *map(_says, (b"", b"[" * 9999, [], {}, {"metadata": {}}, {"metadata": 3, "spec": []})),
        lambda server: setattr(server, "deaf_answers", True),
        lambda server: setattr(server, "delay_s", 1.5),
        lambda server: setattr(server, "late_s", 2.5),
    ],
)
def test_who_cannot_renew_admits_nothing_and_goes_on_when_it_can(
    play: Play, trouble: Callable[[LeaseServer], None]
) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        await election.leader()
        await asyncio.sleep(2.0)
        trouble(election.server)
        await election.until(lambda: not election.leaders, limit_s=3.0)
        await asyncio.sleep(20.0)
        assert not election.leaders
        standings = [one.leadership.state() for one in election.candidates]
        assert all(one.failed > 5 for one in standings) or election.server.failure in (404, 409)
        server = election.server
        server.silent = server.deaf_answers = False
        server.failure, server.delay_s, server.late_s, server.answer = 0, 0.0, 0.0, None
        assert await election.until(lambda: bool(election.leaders)) < 8.0

    play(scenario)


def test_a_short_trouble_is_not_noticed(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        for number in range(30):
            election.server.failure = 503
            await asyncio.sleep(0.9)
            election.server.failure = 0
            await asyncio.sleep(1.1)
            assert election.leaders == [leader.name], number
        assert leader.leadership.state().failed > 10

    play(scenario)


def test_a_slow_server_moves_the_end_of_no_term(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a")
        leader = await election.leader()
        election.server.delay_s = 0.8
        await asyncio.sleep(5.0)
        assert leader.leads
        # From the request on, not from the answer.
        election.server.requests.clear()
        await election.until(lambda: bool(election.server.requests))
        sent_s = election.loop.time()
        election.server.silent = True
        await election.until(lambda: not leader.leads)
        assert election.loop.time() - sent_s < 2.0 + 0.02

    play(scenario)


@pytest.mark.parametrize(
    "edit",
    [
        {"holderIdentity": ""},
        {"holderIdentity": None},
        {"holderIdentity": "somebody"},
        {"holderIdentity": 7},
        {"holderIdentity": "x\r\ny" + "z" * 500},
        {"renewTime": "yesterday"},
        {"renewTime": None},
        {"renewTime": {"a": 1}},
        {"leaseDurationSeconds": 0},
        {"leaseDurationSeconds": -5},
        {"leaseDurationSeconds": "long"},
        {"leaseDurationSeconds": 10**12},
        {"leaseDurationSeconds": None},
        {"leaseTransitions": "many"},
        {"leaseTransitions": (1 << 31) - 1},
        {"leaseTransitions": -1},
        {"acquireTime": [], "strategy": "OldestEmulationVersion"},
        dict.fromkeys(
            (
                "holderIdentity",
                "renewTime",
                "leaseTransitions",
                "leaseDurationSeconds",
                "acquireTime",
            )
        ),
    ],
)
def test_a_lease_that_is_edited_by_hand_makes_no_two_leaders(
    play: Play, edit: dict[str, object]
) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        await election.leader()
        for pause_s in (2.0, 2.13, 2.29, 2.41):
            await asyncio.sleep(pause_s)
            election.server.edit(**edit)
            # What others may believe to be another replica's is waited for as long as one may be.
            await election.until(lambda: bool(election.leaders), limit_s=65.0)
        await asyncio.sleep(10.0)
        await election.until(lambda: bool(election.leaders))
        transitions = election.server.spec["leaseTransitions"]
        assert isinstance(transitions, int)
        assert 0 <= transitions < 1 << 31

    play(scenario)


def test_a_leader_goes_on_behind_an_edit_of_nothing_that_counts(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        for number in range(20):
            lease = election.server.lease
            assert lease is not None
            lease["metadata"].setdefault("labels", {})["touched"] = str(number)
            election.server.edit()
            await asyncio.sleep(0.31)
            assert election.leaders == [leader.name]
        assert election.server.lease is not None
        assert election.server.lease["metadata"]["labels"] == {"touched": "19"}

    play(scenario)


def test_a_lease_that_is_deleted_is_made_again(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        for pause_s in (1.0, 1.1, 1.23, 1.37):
            await asyncio.sleep(pause_s)
            election.server.delete()
        await asyncio.sleep(1.0)
        assert election.leaders == [leader.name]
        # Deleted while its leader is away: who follows cannot know when that renewed last.
        leader.stop_for(10.0)
        election.server.delete()
        took_s = await election.until(lambda: election.other(leader).leads)
        assert took_s > 2.9

    play(scenario)


def test_a_leader_that_was_deposed_by_hand_stops_at_once(play: Play) -> None:
    async def scenario(election: Election) -> None:
        leader = election.stand("a")
        await election.leader()
        await asyncio.sleep(1.0)
        election.server.edit(holderIdentity="somebody")
        assert await election.until(lambda: not leader.leads) < 0.7
        assert leader.leadership.forbids() == "follower of somebody"
        # Nobody renews it: it is taken back.
        assert 2.9 < await election.until(lambda: leader.leads) < 3.6

    play(scenario)


def test_two_of_one_identity_do_not_both_lead(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a", identity="same"), election.stand("b", identity="same")
        first = await election.leader()
        await asyncio.sleep(30.0)
        assert election.leaders == [first.name]
        assert election.other(first).leadership.forbids().endswith("another process called same")
        await first.kill()
        election.candidates.remove(first)
        assert 2.0 < await election.until(lambda: bool(election.leaders)) < 4.0

    play(scenario)


def test_a_longer_duration_of_the_other_is_waited_for(play: Play) -> None:
    async def scenario(election: Election) -> None:
        slow = election.stand("slow", lease_s=15)
        await election.leader()
        await asyncio.sleep(8.0)
        election.stand("quick", lease_s=2)
        await asyncio.sleep(8.0)
        slow.stop_for(40.0)
        took_s = await election.until(lambda: election.leaders == ["quick"])
        assert 12.0 < took_s < 16.0

    play(scenario)


def test_a_write_whose_answer_is_lost_is_recognised(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        for _ in range(10):
            await asyncio.sleep(1.3)
            election.server.deaf_answers = True
            await asyncio.sleep(1.2)
            election.server.deaf_answers = False
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
        assert election.leaders == [leader.name]
        assert election.server.spec["leaseTransitions"] == 1

    play(scenario)


def test_both_killed_and_begun_again(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        await election.leader()
        for one in election.candidates:
            await one.kill()
        election.candidates.clear()
        election.stand("c"), election.stand("d")
        assert 2.9 < await election.until(lambda: bool(election.leaders)) < 3.8

    play(scenario)


def test_one_that_leaves_during_an_election_does_not_lead(play: Play) -> None:
    async def scenario(election: Election) -> None:
        a, b = election.stand("a"), election.stand("b")
        election.server.delay_s = 0.4
        await asyncio.sleep(3.2)
        await asyncio.gather(a.leadership.retire(), asyncio.sleep(0.0))
        await election.until(lambda: b.leads)
        await asyncio.sleep(10.0)
        assert election.leaders == ["b"]

    play(scenario)


def test_a_roll_out_of_two_has_one_lead_throughout(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        follower = election.other(leader)
        election.stand("c"), election.stand("d")
        await asyncio.sleep(1.0)
        await follower.leadership.retire()
        await follower.kill()
        election.candidates.remove(follower)
        await asyncio.sleep(5.0)
        assert election.leaders == [leader.name]
        await leader.leadership.retire()
        assert await election.until(lambda: bool(election.leaders)) < 0.7
        assert election.leaders[0] in ("c", "d")
        await leader.kill()
        await asyncio.sleep(10.0)
        assert len(election.leaders) == 1
        assert election.server.spec["leaseTransitions"] == 2

    play(scenario)


def test_who_was_cut_off_reads_the_loads_again_before_it_decides(play: Play) -> None:
    async def scenario(election: Election) -> None:
        a = election.stand("a")
        read, site = [], MagicMock()

        async def read_loads() -> None:
            read.append(election.loop.time())

        site.read_loads, a.groups = read_loads, [site]
        await election.leader()
        assert len(read) == 1
        a.cut_off = True
        b = election.stand("b")
        await election.until(lambda: b.leads)
        await asyncio.sleep(5.0)
        await b.leadership.retire()
        assert len(read) == 1
        a.cut_off = False
        await election.until(lambda: a.leads)
        assert len(read) == 2

    play(scenario)


def test_who_leaves_while_it_renews_gives_it_up(play: Play) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a"), election.stand("b")
        leader = await election.leader()
        election.server.delay_s = 0.3
        await asyncio.sleep(3.0)
        renewals = len(election.server.requests)
        await election.until(lambda: len(election.server.requests) > renewals)
        await leader.leadership.retire()
        assert await election.until(lambda: election.other(leader).leads) < 1.6

    play(scenario)


def test_servers_errors_are_told_once(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(election: Election) -> None:
        election.stand("a")
        await election.leader()
        election.server.failure = 403
        await asyncio.sleep(30.0)
        told = [r for r in caplog.records if r.getMessage() == "it is not known who leads"]
        assert [r.__dict__["fields"]["reason"] for r in told] == ["status 403: it fails"]
        lapsed = [r for r in caplog.records if "nothing is admitted" in r.getMessage()]
        assert len(lapsed) == 1

    play(scenario)
