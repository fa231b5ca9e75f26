"""A soak's plan: drawn from its seed, and of what real processes can be made to do."""

import asyncio
import json
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.native import needs_native
from tests.support.chaos.clients import ClientPhase
from tests.support.chaos.faults import Act
from tests.support.chaos.plan import ChaosPlan
from tests.support.chaos.world import WorldSettings
from tests.support.played import in_real_time
from tests.support.soak.run import (
    SoakLoad,
    SoakSettings,
    draw_plan,
    held_by_engines,
    held_by_proxy,
    phase_of,
    record_of,
    soak,
)

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.request_log import line_of

WORLD = WorldSettings(EmulationSettings(prefillers=2, ranks=4), {})
SEEN_FROM_OUTSIDE = {
    ClientPhase.SENDING,
    ClientPhase.AFTER,
    ClientPhase.STREAMING,
    ClientPhase.LAST_WORD,
}


@cache
def plan() -> ChaosPlan:
    return draw_plan(5, range(2_000), WORLD, calm=False)


def test_a_seed_and_its_numbers_decide_the_plan() -> None:
    one, same, other = (
        draw_plan(5, range(first, first + 200), WORLD, calm=False) for first in (0, 0, 200)
    )
    assert one == same
    assert one.injections != other.injections
    assert {request.number for request in other.requests} == set(range(200, 400))


def test_its_clients_leave_at_what_they_see_over_plain_wires() -> None:
    visits = plan().visits
    assert {one.departure.phase for one in visits if one.departure} == SEEN_FROM_OUTSIDE
    assert not any(one.link or one.pauses for one in visits)


def test_the_engine_that_takes_the_orders_stays_within_reach() -> None:
    injections = plan().injections
    assert {one.act for one in injections} == {Act.BOARD, Act.KILL, Act.DRAIN}
    away = {
        (one.role, one.engine)
        for one in injections
        if one.act is Act.KILL or "refuse" in one.changes
    }
    assert (Role.PREFILL, 1) not in away
    assert len(away) > 3


def test_nothing_goes_wrong_in_a_calm_one() -> None:
    calm = draw_plan(5, range(200), WORLD, calm=True)
    assert not calm.injections
    assert not any(one.departure for one in calm.visits)


# The soak's clients: each request is sent, or told to be lost.


@in_real_time()
async def test_without_a_proxy_every_request_is_lost_while_the_plan_goes_on() -> None:
    world = WorldSettings(EmulationSettings(prefillers=2, ranks=4), {})
    plan = draw_plan(1, range(40), world, calm=True)
    with socket.socket() as bound:  # Bound, not listening: nobody else gets the port.
        bound.bind(("127.0.0.1", 0))
        load = SoakLoad(plan, "127.0.0.1", bound.getsockname()[1])
        running = asyncio.create_task(load.run(3))
        await load.reached(plan.calm_s / 2)
        assert 20 <= len(load.lost) < 40
        await running
        await load.reached(2 * plan.calm_s)
    assert sorted(load.lost) == sorted(request.request_id for request in plan.requests)


# The soak in small: processes, sockets, clients that leave, engines that fail, and nothing left.


SMALL = SoakSettings(requests=150, warm_up=10, afterwards=10, seed=1, wait_for_idle=False)


def test_nothing_is_left_behind_and_every_answer_is_right_or_a_true_error(tmp_path: Path) -> None:
    report = soak(replace(SMALL, native="off"), tmp_path)
    assert not report.wrong, report.text()
    rows = {name.strip(): value for name, value, _ in report.rows}
    # What a run without faults and departures would look like.
    assert rows["left"] != "0"
    assert rows["retries"] != "0"
    assert rows["requests with faults"] == "150"


@pytest.mark.extended
@needs_native
def test_nor_is_it_where_streams_are_moved_natively(tmp_path: Path) -> None:
    report = soak(replace(SMALL, native="require"), tmp_path)
    assert not report.wrong, report.text()
    rows = {name.strip(): value for name, value, _ in report.rows}
    assert rows["events moved natively"] != "0"


# What the soak reads off the proxy's pages and log.


def test_a_log_line_tells_the_record_but_for_its_times() -> None:
    record = RequestRecord(
        request_id="req-3",
        endpoint="/v1/completions",
        arrived_ns=0,
        arrived_unix_s=7.5,
        model="m",
        stream=True,
        outcome=Outcome.UPSTREAM_ERROR,
        status=502,
        output_tokens=4,
        retries=2,
        recomputes=1,
        reason="it failed",
    )
    assert record_of(json.loads(line_of(record))) == record


def test_a_cancelled_request_was_where_its_times_end() -> None:
    line: dict[str, object] = {"queue_s": None, "prefill_s": None, "rank": "", "ttft_s": None}
    phases = [phase_of(line)]
    for name in line:
        line[name] = 0.1
        phases.append(phase_of(line))
    assert phases == ["queued", "prefilling", "pooled", "before the first token", "streaming"]


def test_whatever_is_held_is_told() -> None:
    rank = {"name": "d", "kv_tokens": 0, "bound": 0, "started": 0}
    prefiller = {"name": "p", "probes": 0, "held_tokens": 0}
    counts = ("queued", "prefilling", "pooled", "decoding", "client_connections")
    state = dict.fromkeys(counts, 0) | {"ranks": [rank], "prefillers": [prefiller]}
    assert held_by_proxy(state) == {}
    for name in counts:
        assert list(held_by_proxy(state | {name: 2}).values()) == [2]
    for name in ("kv_tokens", "bound", "started"):
        assert held_by_proxy(state | {"ranks": [rank | {name: 3}]}) == {f"{name} of d": 3}
    for name in ("probes", "held_tokens"):
        held = held_by_proxy(state | {"prefillers": [prefiller | {name: 3}]})
        assert held == {f"{name} of p": 3}
    lists = ("loads", "running", "waiting", "arriving", "held_blocks")
    stats = {name: [0, 0] for name in lists} | {"idle": True, "leases": {"held": 0}}
    assert held_by_engines(stats) == {}
    for name in lists:
        assert held_by_engines(stats | {name: [0, 1]}) == {name: [0, 1]}
    assert held_by_engines(stats | {"idle": False})
    assert held_by_engines(stats | {"leases": {"held": 1}})
