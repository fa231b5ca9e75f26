"""All live requests: their numbers, their names at the engines, and when none is left."""

import asyncio
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from balanceroute.proxy.live.scheduling.driver import SessionTable
from balanceroute.proxy.live.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session


def add(table: SessionTable, request_id: str) -> "Session":
    record = RequestRecord(request_id, "/v1/completions", 0, 0.0)
    session = cast("Session", SimpleNamespace(number=table.next_number(), record=record))
    table.add(session)
    return session


def test_a_request_of_a_name_in_use_gets_another_one_at_the_engines() -> None:
    table = SessionTable(random.Random(1))
    assert table.engine_id("a") == "a"
    one, two = add(table, "a"), add(table, "a")
    assert (one.number, two.number) == (0, 1)
    table.remove(one.number, one.record)
    name = table.engine_id("a")
    assert name.startswith("a-")
    assert table.engine_id("a") != name
    table.remove(two.number, two.record)
    assert table.engine_id("a") == "a"
    assert table.idle


def test_a_wait_for_the_last_request_ends_with_it() -> None:
    async def scenario() -> None:
        table = SessionTable(random.Random(1))
        await table.drained()
        session = add(table, "a")
        assert not table.idle
        drained = asyncio.ensure_future(table.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        table.remove(session.number, session.record)
        await drained

    asyncio.run(scenario())
