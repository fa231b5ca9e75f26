"""Two whole proxies before one fleet: who leads serves, who follows refuses, and takes over."""

import asyncio
from typing import Any

import pytest
from tests.live.leader.replicas import Replicas, play_replicas
from tests.support.site import Exchanged

from balanceroute.proxy.live.engines.instances import Role


def _above(site: Replicas) -> int:
    """Return for how many looks in a row, of 10 ms, a rank stood above its slots, at most."""
    longest = now = 0
    for over in site.over:
        now = now + 1 if over else 0
        longest = max(longest, now)
    return longest


def test_who_follows_is_warm_and_not_ready_and_refuses() -> None:
    async def scenario(site: Replicas) -> None:
        leader = await site.leader()
        other = site.other(leader)
        await asyncio.sleep(3.0)
        assert (await site.send(leader, "/ready").end()).status == 200
        ready = await site.send(other, "/ready").end()
        assert ready.status == 503
        assert ready.json["error"]["message"] == f"follower of {site.server.holder}"
        assert ready.header(b"retry-after") == b"1"
        assert (await site.send(other, "/health").end()).status == 200
        paths = ("completions", "chat/completions", "messages", "responses", "embeddings")
        for path in (*(f"/v1/{one}" for one in paths), "/tokenize", "/inference/v1/generate"):
            refused = await site.send(other, path, {"prompt": "x", "model": "tiny"}).end()
            assert refused.status == 503, path
            assert f"follower of {site.server.holder}" in refused.body.decode()
            assert refused.header(b"retry-after") == b"1"
        error = (await site.send(other, "/v1/messages", {}).end()).json
        assert error["type"] == "error"
        # It knows its engines and what they have.
        deployment = other.proxy.deployment
        assert all(one.open for one in deployment.instances.ranks)
        assert {t.role for t in deployment.scraper.gauges()} == {Role.PREFILL, Role.DECODE}
        assert (await site.complete(leader).end()).done

    play_replicas(scenario)


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ("killed", {}),
        ("drained", {}),
        pytest.param("drained", {"connector": "mooncake"}, marks=pytest.mark.extended),
        pytest.param("drained", {"connector": "mooncake-ascend"}, marks=pytest.mark.extended),
        pytest.param("killed", {"connector": "mooncake-layerwise"}, marks=pytest.mark.extended),
        ("drained", {"connector": "mooncake-layerwise"}),
    ],
    ids=str,
)
def test_ranks_never_stand_above_their_slots_when_another_one_leads(
    how: str, changes: dict[str, Any]
) -> None:
    async def scenario(site: Replicas) -> None:
        for _ in range(3):
            leader = await site.leader()
            other = site.other(leader)
            sent = [site.complete(leader, tokens=60 + 9 * n, prompt=200) for n in range(24)]
            await site.until(lambda: sum(bool(one.events) for one in sent) >= 8)  # noqa: B023
            began_s = site.loop.time()
            end = asyncio.create_task(
                leader.close_proxy() if how == "killed" else leader.drain(), context=leader.context
            )
            await site.until(lambda: other.leads)  # noqa: B023
            assert site.loop.time() - began_s < (4.5 if how == "killed" else 1.8)
            more = [site.complete(other, tokens=50, prompt=200) for _ in range(24)]
            await asyncio.gather(*(one.end() for one in [*sent, *more]))
            assert all(one.done for one in more)
            _all_told(sent)
            assert how == "killed" or sum(one.done for one in sent) >= 8
            await end
            if how == "drained":
                await leader.close_proxy()
            site.all.remove(leader)
            await site.begin()

    site = play_replicas(scenario, **changes)
    # A step takes 31 ms.
    assert _above(site) <= 4
    assert not site.fleet.misreads


def _all_told(sent: list[Exchanged]) -> None:
    """Check that each got a whole answer, or a clear error."""
    for one in sent:
        told = one.done or one.error is not None or one.status == 503 or b'"error"' in one.body
        assert told, (one.status, one.body[-200:])


def test_a_stopped_leader_gives_nothing_to_engines_when_it_goes_on() -> None:
    async def scenario(site: Replicas) -> None:
        leader = await site.leader()
        other = site.other(leader)
        sent = [site.complete(leader, tokens=400, prompt=200) for _ in range(30)]
        await site.until(lambda: sum(bool(one.events) for one in sent) >= 8)
        await asyncio.sleep(0.3)
        leader.stop_for(10.0)
        await asyncio.sleep(9.9)
        assert other.leads
        scheduler = leader.proxy.deployment.driver.scheduler
        assert scheduler.pool.slots
        waiting = [one for one in sent if not one.events]
        await asyncio.gather(*(one.end() for one in waiting))
        # What waited was given to nobody, and its clients know.
        assert {one.status for one in waiting} == {503}
        assert all("follower of" in one.json["error"]["message"] for one in waiting)
        # What ran goes on.
        running = [one for one in sent if one not in waiting]
        await asyncio.gather(*(one.end() for one in running))
        assert len(running) >= 8
        assert all(one.done for one in running)

    site = play_replicas(scenario)
    assert _above(site) <= 4


def test_what_waits_goes_on_when_a_silent_server_answers_again() -> None:
    async def scenario(site: Replicas) -> None:
        leader = await site.leader()
        sent = [site.complete(leader, tokens=200, prompt=200) for _ in range(20)]
        await site.until(lambda: sum(bool(one.events) for one in sent) >= 8)
        site.server.silent = True
        await site.until(lambda: not leader.leads)
        begun = {one for one in sent if one.events}
        refused = await site.complete(leader).end()
        assert refused.status == 503
        assert "could not renew" in refused.json["error"]["message"]
        await asyncio.sleep(12.0)
        assert {one for one in sent if one.events} == begun
        assert len(begun) < 20
        site.server.silent = False
        await asyncio.gather(*(one.end() for one in sent))
        assert all(one.done for one in sent)

    play_replicas(scenario, count=1)


def test_a_request_whose_body_comes_after_the_lead_has_passed_on_is_refused() -> None:
    async def scenario(site: Replicas) -> None:
        leader = await site.leader()
        sent = []
        for path in ("/v1/completions", "/tokenize"):
            values = b'{"prompt": "x", "model": "tiny"}'
            head = (
                b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % path.encode()
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", leader.port)
            writer.write(head + b"content-length: %d\r\n\r\n" % len(values))
            sent.append((reader, writer, values))
        await asyncio.sleep(0.1)
        site.server.edit(holderIdentity="somebody")
        await site.until(lambda: not leader.leads)
        for reader, writer, values in sent:
            writer.write(values)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"retry-after: 1" in answer.lower()
            writer.close()

    play_replicas(scenario, count=1)


def test_the_page_and_the_metrics_tell_who_leads() -> None:
    async def scenario(site: Replicas) -> None:
        leader = await site.leader()
        other = site.other(leader)
        await asyncio.sleep(2.0)
        for one, leads in ((leader, 1), (other, 0)):
            page = (await site.send(one, "/metrics").end()).body.decode()
            assert f"balanceroute_leader {leads}" in page.replace(".0\n", "\n")
            told = (await site.send(one, "/admin/state", admin=True).end()).json["leader"]
            assert (told["leads"], told["leader"]) == (bool(leads), site.server.holder)
            assert one.proxy.view()["forbidden"] == (
                "" if leads else f"follower of {told['leader']}"
            )

    play_replicas(scenario)
