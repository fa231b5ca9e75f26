"""Engines that fail while requests are under way: quarantine, recovery, and whole roles that are down."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.long_streams import BODY, COMPLETIONS, body, order, right, rows, streaming
from tests.support.site import Exchanged, Site, play, served

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

EMBEDDINGS = "/v1/embeddings"


def test_an_engine_that_fails_is_quarantined_and_comes_back() -> None:
    async def scenario(site: Site) -> None:
        site.fleet.faults.set("decode/0", status_500=1.0)
        await right_but_for_retries(site)
        url = site.fleet.engine("decode/0").url
        assert (await rows(site))[url]["status"] == "quarantined"
        site.seen.clear()
        await right_but_for_retries(site)
        # It goes on to fail, but its health is well: on trial, its next failure sends it back.
        assert len(site.received("decode/0")) <= 1
        site.fleet.faults.clear("decode/0")
        await asyncio.sleep(70.0)
        assert (await rows(site))[url]["status"] == "up"
        site.seen.clear()
        await right(site, await streaming(site, 4))
        assert len(site.received("decode/0")) >= 2

    async def right_but_for_retries(site: Site) -> None:
        for i in range(5):
            await right_one(site, i)

    async def right_one(site: Site, i: int) -> None:
        exchange = site.send(COMPLETIONS, body(i, max_tokens=3))
        assert (await exchange.end()).done

    play(scenario, flags={"quarantine_failures": 2})


@served()
async def test_a_killed_engine_costs_nobody_an_answer_and_is_back_once_restored(site: Site) -> None:
    site.fleet.kill("prefill/0")
    site.fleet.kill("decode/0")
    exchanges = [site.send(COMPLETIONS, body(i, max_tokens=5)) for i in range(6)]
    for exchange in exchanges:
        assert (await exchange.end()).done
    by_url = await rows(site)
    down = [site.fleet.engine(name).url for name in ("prefill/0", "decode/0")]
    assert [by_url[url]["status"] for url in down] == ["quarantined"] * 2
    for name in ("prefill/0", "decode/0"):
        await site.fleet.restore(name)
    await asyncio.sleep(10.0)
    by_url = await rows(site)
    assert [by_url[url]["status"] for url in down] == ["up"] * 2
    site.seen.clear()
    await right(site, await streaming(site, 4))
    assert len({seen.engine for seen in site.seen if seen.values["stream"] is False}) == 2


@served(flags={"batch": 64}, batch_limit=64)
async def test_a_rank_takes_no_answer_along_however_many_it_has(site: Site) -> None:
    exchanges = [site.send(COMPLETIONS, body(i, max_tokens=600, stream=False)) for i in range(128)]
    await site.until(lambda: len(site.received("decode/0", COMPLETIONS)) > 60)
    site.fleet.kill("decode/0")
    for exchange in exchanges:
        assert (await exchange.end()).status == 200, exchange.body
    assert sum(record.retries for record in site.world.ended) > 60


@served()
async def test_a_prefiller_takes_no_answer_along_however_many_it_has(site: Site) -> None:
    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        if engine != "prefill/0":
            reply.send(200, [(b"content-type", b"application/json")], b"{}")

    site.handlers[EMBEDDINGS.encode()] = answer
    exchanges = [site.send(EMBEDDINGS, {"model": "tiny", "input": "t1"}) for _ in range(128)]
    await site.until(lambda: len(site.received("prefill/0", EMBEDDINGS)) > 60)
    site.fleet.kill("prefill/0")
    for exchange in exchanges:
        assert (await exchange.end()).status == 200, exchange.body
    assert sum(record.retries for record in site.world.ended) > 60


@served()
async def test_a_prefiller_that_says_it_is_dead_takes_no_answer_along(site: Site) -> None:
    replies: list[Reply] = []
    dead = b'{"error": {"message": "EngineCore encountered an issue.", "type": "EngineDeadError"}}'

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        if engine == "prefill/0":
            replies.append(reply)
        else:
            reply.send(200, [(b"content-type", b"application/json")], b"{}")

    site.handlers[EMBEDDINGS.encode()] = answer
    exchanges = [site.send(EMBEDDINGS, {"model": "tiny", "input": "t1"}) for _ in range(128)]
    await site.until(lambda: len(replies) > 60)
    for reply in replies:
        reply.send(500, [(b"content-type", b"application/json")], dead)
    for exchange in exchanges:
        assert (await exchange.end()).status == 200, exchange.body
    assert sum(record.retries for record in site.world.ended) > 60


@served(flags={"quarantine_failures": 1_000})
async def test_prefillers_that_fit_no_rank_are_not_lost(site: Site) -> None:
    """They serve such requests: what they break off takes from the retry budget."""
    for prefiller in site.world.proxy.deployment.instances.prefillers:
        prefiller.unfit = "another version"
    site.handlers[b"/v1/models"] = lambda _engine, _request, reply: reply.abort()
    exchanges = [site.send("/v1/models", method="GET") for _ in range(60)]
    for exchange in exchanges:
        assert (await exchange.end()).status == 502
    # A fifth of the requests and ten more.
    assert 0 < sum(record.retries for record in site.world.ended) <= 60 // 5 + 10


@served()
async def test_an_unhealthy_engine_is_quarantined_by_its_probes_alone(site: Site) -> None:
    site.fleet.faults.set("prefill/1", unhealthy=True)
    await asyncio.sleep(15.0)
    url = site.fleet.engine("prefill/1").url
    assert (await rows(site))[url]["status"] == "quarantined"
    site.fleet.faults.clear("prefill/1")
    await asyncio.sleep(15.0)
    assert (await rows(site))[url]["status"] == "up"


@served()
async def test_an_operators_drain_outlasts_a_quarantine(site: Site) -> None:
    url = site.fleet.engine("decode/0").url
    site.fleet.kill("decode/0")
    await asyncio.sleep(5.0)
    assert (await rows(site))[url]["status"] == "quarantined"
    await site.admin("/admin/instances/drain", order(site, "decode/0"))
    await site.fleet.restore("decode/0")
    await asyncio.sleep(10.0)
    assert (await rows(site))[url]["status"] == "draining"


@served()
async def test_a_drained_engine_that_is_taken_back_while_it_is_down_is_not_used(site: Site) -> None:
    url = site.fleet.engine("decode/0").url
    await site.admin("/admin/instances/drain", order(site, "decode/0"))
    site.fleet.kill("decode/0")
    await asyncio.sleep(5.0)
    answer = await site.admin("/admin/instances", order(site, "decode/0"))
    assert answer.status == 200
    assert (await rows(site))[url]["status"] == "quarantined"
    for exchange in await streaming(site, 4):
        assert (await exchange.end()).done
    assert {record.retries for record in site.world.ended} == {0}
    await site.fleet.restore("decode/0")
    await asyncio.sleep(30.0)
    assert (await rows(site))[url]["status"] == "up"


@served()
async def test_a_full_prefiller_gets_no_probe(site: Site) -> None:
    page = b'vllm:kv_cache_usage_perc{engine="0"} %b\nvllm:num_requests_running{engine="0"} 0\n'
    page += b'vllm:num_requests_waiting{engine="0"} 0\n'
    usage = {"prefill/0": b"0.96", "prefill/1": b"0.9"}
    site.handlers[b"/metrics"] = lambda engine, _, reply: reply.send(
        200, [(b"content-type", b"text/plain")], page % usage.get(engine, b"0")
    )
    await asyncio.sleep(3.0)
    state = await site.state()
    assert [(one["utilisation"], one["open"]) for one in state["prefillers"]] == [
        (0.96, False),
        (0.9, True),
    ]
    await right(site, await streaming(site, 4))
    assert site.received("prefill/0") == []
    usage["prefill/0"] = b"0.1"
    await asyncio.sleep(3.0)
    site.seen.clear()
    await right(site, await streaming(site, 4))
    assert len(site.received("prefill/0", COMPLETIONS)) == 2


@served()
async def test_when_every_prefiller_is_full_requests_wait(site: Site) -> None:
    usage = b"1.0"

    def tell(engine: str, request: object, reply: Any) -> None:
        del engine, request
        page = b'vllm:kv_cache_usage_perc{engine="0"} %b\n' % usage
        page += b'vllm:num_requests_running{engine="0"} 0\n'
        reply.send(200, [], page + b'vllm:num_requests_waiting{engine="0"} 0\n')

    site.handlers[b"/metrics"] = tell
    await asyncio.sleep(3.0)
    exchange = site.send(COMPLETIONS, BODY)
    await asyncio.sleep(5.0)
    assert site.seen == []
    assert exchange.status == 0
    usage = b"0.2"
    assert (await exchange.end()).done


@pytest.mark.parametrize("role", ["prefill", "decode"])
@served()
async def test_a_role_that_is_down_is_told_at_once(site: Site, role: str) -> None:
    for number in ("0", "1"):
        site.fleet.kill(f"{role}/{number}")
    # Nobody knows yet: the first requests find out, and wait for a moment for a restart.
    early = [site.send(COMPLETIONS, body(i)) for i in range(3)]
    await asyncio.sleep(5.0)
    begin_s = site.loop.time()
    late = [await site.post(COMPLETIONS, BODY) for _ in range(3)]
    assert site.loop.time() - begin_s < 0.05
    await asyncio.gather(*(exchange.end() for exchange in early))
    assert site.loop.time() - begin_s < 11.0
    for answer in early + late:
        assert answer.status == 503
        assert answer.header(b"retry-after") == b"1"
        assert "is up" in answer.json["error"]["message"]
    if role == "decode":  # Nothing is prefilled for nobody.
        assert len(site.received("prefill")) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
@served()
async def test_who_waits_for_a_role_that_comes_back_is_served(site: Site, role: str) -> None:
    for number in ("0", "1"):
        site.fleet.kill(f"{role}/{number}")
    exchanges = [site.send(COMPLETIONS, body(i)) for i in range(3)]
    await asyncio.sleep(5.0)
    await site.fleet.restore(f"{role}/1")
    for exchange in exchanges:
        assert (await exchange.end()).done


@served()
async def test_an_outage_long_ago_does_not_shorten_the_wait(site: Site) -> None:
    for i in range(10):  # They earn the retries.
        await site.post(COMPLETIONS, body(i, max_tokens=1))
    exchanges: list[Exchanged] = []
    for last in (False, True):
        for number in ("0", "1"):
            site.fleet.kill(f"decode/{number}")
        exchanges.append(site.send(COMPLETIONS, BODY))
        await asyncio.sleep(3.0)
        assert exchanges[-1].status == 0
        if not last:
            exchanges[-1].call.abort()
            await asyncio.sleep(3.0)
        for number in ("0", "1"):
            await site.fleet.restore(f"decode/{number}")
        await asyncio.sleep(60.0)
    assert exchanges[-1].done


@pytest.mark.parametrize("fault", ["none", "killed", "unhealthy"])
@served()
async def test_what_engines_are_asked_leaves_nothing_to_the_garbage_collector(
    site: Site, cyclic: Callable[[], Counter[str]], fault: str
) -> None:
    await asyncio.sleep(5.0)
    if fault == "killed":
        site.fleet.kill("prefill/0")
        site.fleet.kill("decode/0")
    elif fault == "unhealthy":
        site.fleet.faults.set("prefill/0", unhealthy=True)
    await asyncio.sleep(5.0)
    cyclic()
    await asyncio.sleep(20.0)
    left = cyclic()
    assert not left.keys() & {"Response", "_Collector", "FetchError", "WireError"}
    assert not left["Call"]
    for name in ("prefill/0", "decode/0"):
        if fault == "killed":
            await site.fleet.restore(name)
    await asyncio.sleep(15.0)
