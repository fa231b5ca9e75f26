"""A limit on requests in flight in a proxy: who waits, how a wait ends, and what is told of it."""

import pytest
from tests.live.frontend.gateway_requests import BODY
from tests.support.site import Site, served

COMPLETIONS = "/v1/completions"
LIMIT = {"aimd": "post5", "aimd_min": 1, "aimd_max": 1, "pool_ttl_s": 1.0}


def body(number: int, **more: object) -> dict[str, object]:
    return BODY | {"prompt": [number + 1] * 20, "stream": True} | more


@served(prefillers=1, ranks=1, flags=LIMIT | {"queue_ttl_s": 30.0})
async def test_a_request_beyond_the_limit_waits_for_the_end_of_another(site: Site) -> None:
    first = site.send(COMPLETIONS, body(0, max_tokens=8))
    await first.until_events(1)
    second = site.send(COMPLETIONS, body(1))
    await site.until(lambda: site.world.scheduler.prefill_queue.waiting == 1)
    # Nothing of it was begun, although prefiller and rank have room.
    assert len(site.received("prefill")) == 1
    assert (await first.end()).done
    assert (await second.end()).done


@pytest.mark.parametrize("status", [503, 504])
@served(prefillers=1, ranks=1, flags=lambda status: LIMIT | {"expired_status": status})
async def test_a_wait_for_room_ends_with_the_acquire_timeout(site: Site, status: int) -> None:
    first = site.send(COMPLETIONS, body(0, max_tokens=300))
    await first.until_events(1)
    begin_s = site.loop.time()
    second = await site.send(COMPLETIONS, body(1)).end()
    assert second.status == status
    # Half of the target of 2 s.
    assert site.loop.time() - begin_s == pytest.approx(1.0, abs=0.26)
    page = (await site.get("/metrics")).body
    assert b"\nbalanceroute_inflight_limit 1\n" in page
    assert b"\nbalanceroute_inflight_requests 1\n" in page
    assert b'balanceroute_inflight_limit_decisions_total{decision="unknown"}' in page
    assert (await first.end()).done


@served()
async def test_without_a_limit_nothing_is_told_of_one(site: Site) -> None:
    assert b"balanceroute_inflight" not in (await site.get("/metrics")).body
