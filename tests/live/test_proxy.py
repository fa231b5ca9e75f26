"""A proxy whose listening sockets another process has taken, in virtual time."""

import asyncio
from typing import Any

import pytest
from tests.support.site import Site, served

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 20, "ignore_eos": True}
STREAM = BODY | {"stream": True}
LONG = STREAM | {"max_tokens": 800}


def hand_over(site: Site) -> "asyncio.Task[None]":
    return asyncio.create_task(site.world.proxy.hand_over())


@pytest.mark.parametrize("body", [BODY, STREAM])
@served()
async def test_every_open_connection_has_its_answer_and_then_it_is_over(
    site: Site, body: dict[str, Any]
) -> None:
    long = site.send(COMPLETIONS, LONG)
    await long.until_events(3)
    assert (await site.post(COMPLETIONS, BODY)).status == 200  # Leaves a connection idle.
    over = hand_over(site)
    await asyncio.sleep(1.0)
    last = await site.post(COMPLETIONS, body)
    assert last.status == 200
    assert last.error is None
    assert last.header(b"connection") == b"close"
    alone = await site.send(COMPLETIONS, BODY).end()
    assert alone.error is not None  # It would be the other process's.
    await asyncio.sleep(2.0)
    assert not over.done()
    assert not long.over
    await long.end()
    assert long.done
    await over


@served(at_rest=False, flags={"drain_timeout_s": 5.0})
async def test_it_takes_no_longer_than_a_drain_and_then_says_so_to_clients(site: Site) -> None:
    endless = site.send(COMPLETIONS, LONG)
    await endless.until_events(3)
    began_s = site.loop.time()
    await hand_over(site)
    assert 5.0 <= site.loop.time() - began_s <= 5.1
    await site.world.proxy.drain()
    assert site.loop.time() - began_s <= 5.2
    assert not endless.over
    await site.world.proxy.close()
    await endless.end()
    assert "shutting down" in endless.chunks[-1]["error"]["message"]
