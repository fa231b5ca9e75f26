"""Choices of engines for requests whose bytes somebody else moves."""

import asyncio
from typing import Any

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.live.engines.instances import Prefiller, Rank
from balanceroute.proxy.live.selection import (
    Asked,
    Selection,
    SelectionRefusedError,
    Selector,
    endpoint_of,
)
from balanceroute.proxy.live.telemetry.record import Outcome

BATCH = 2
FLAGS = {"batch": BATCH, "scrape_interval_s": 0.5}


def selector_of(site: Site) -> Selector:
    proxy = site.world.proxy
    return Selector(proxy._groups, proxy.gateway.refusals, lambda: 0.0)


async def on_rank(
    selector: Selector, name: str, tokens: int = 100, **more: Any
) -> tuple[Selection, Rank]:
    """Bring a request as far as its rank."""
    found = selector.select(Asked(name, tokens, **more))
    assert isinstance(await found.prefiller(), Prefiller)
    assert found.prefilled(tokens)
    return found, await found.rank()


def state_of(site: Site, selection: Selection) -> LifecycleState:
    assert selection.session is not None
    requests = site.world.proxy.deployment.driver.scheduler.requests
    return requests[selection.session.number].state


async def refused(waiting: Any) -> SelectionRefusedError:
    with pytest.raises(SelectionRefusedError) as caught:
        await waiting
    return caught.value


@served(flags=FLAGS)
async def test_a_request_gets_a_prefiller_then_a_rank_and_ends(site: Site) -> None:
    selector = selector_of(site)
    found, rank = await on_rank(selector, "one")
    assert found.began()
    assert state_of(site, found) is LifecycleState.DECODING
    row = next(one for one in selector.loads() if one["engine"] == rank.name)
    assert (row["requests"], row["kv_tokens"]) == (1, 100)
    assert selector.find("one") is found
    assert found.ended(7)
    assert found.over
    assert selector.find("one") is None
    (record,) = await site.ended()
    assert (record.outcome, record.output_tokens, record.prompt_tokens) == (Outcome.OK, 7, 100)
    assert (record.rank, record.status) == (rank.name, 200)
    # Late words change nothing.
    assert not (found.ended())
    assert not (found.cancel())
    assert not (found.prefilled())
    assert not (found.began())


@served(flags={**FLAGS, "lease_s": 300})
async def test_a_rank_is_waited_for_in_the_pool(site: Site) -> None:
    """A decode call is held until the policy has a slot for it, here for 70 s."""
    selector = selector_of(site)
    held = [await on_rank(selector, f"held{i}") for i in range(2 * BATCH)]
    last = selector.select(Asked("last", 50))
    await last.prefiller()
    waiting = asyncio.create_task(last.rank())
    # The engines themselves have nothing, but their callers tell of tokens.
    for second in range(70):
        for one, _ in held:
            assert not one.over, second
            one.emitted(second)
        _claim_busy(site)
        await asyncio.sleep(1.0)
    assert not waiting.done()
    assert held[1][0].ended()
    assert await waiting is held[1][1]
    for one in (held[0][0], held[2][0], held[3][0], last):
        one.ended()
    assert len(selector) == 0


def _claim_busy(site: Site) -> None:
    """Have no rank count as empty."""
    paces = site.world.proxy.deployment.driver.paces
    assert paces is not None
    for pace in paces._paces.values():
        pace.empty_s = ()


@served(flags=FLAGS)
async def test_the_caller_of_the_rank_implies_the_end_of_the_prefill(site: Site) -> None:
    selector = selector_of(site)
    found = selector.select(Asked("one", 100))
    prefiller = await found.prefiller()
    assert prefiller is not None
    held = site.world.proxy.deployment.driver.scheduler.prefillers.held_tokens
    assert held[prefiller.id] == 100
    await found.rank()
    assert held[prefiller.id] == 100  # Until the rank has pulled it.
    await asyncio.sleep(1.0)  # By then it counts as begun, as nobody says more.
    assert held[prefiller.id] == 0
    found.ended()


@served(flags=FLAGS)
async def test_one_that_is_prefilled_already_needs_no_prefiller(site: Site) -> None:
    selector = selector_of(site)
    found = selector.select(Asked("one", 100, prefilled=True))
    assert await found.prefiller() is None
    await found.rank()
    found.failed("the gateway said 502")
    (record,) = await site.ended()
    assert record.outcome is Outcome.UPSTREAM_ERROR


@served(flags=FLAGS)
async def test_ids_are_used_once_at_a_time_and_bounded(site: Site) -> None:
    selector = selector_of(site)
    found = selector.select(Asked("one", 100))
    for bad, status in (("one", 409), ("", 400), ("x" * 129, 400), ("a b", 400), ("é", 400)):
        with pytest.raises(SelectionRefusedError) as caught:
            selector.open(bad)
        assert caught.value.status == status
        assert b'"error"' in caught.value.body
    found.cancel()
    selector.select(Asked("one", 100)).cancel()
    assert len(selector) == 0


@served(flags={**FLAGS, "queue_limit": 3})
async def test_the_queue_is_bounded(site: Site) -> None:
    selector = selector_of(site)
    found = [selector.select(Asked(str(i), 100)) for i in range(20)]
    failed = [one for one in found if one.refusal is not None]
    assert failed
    assert {one.refusal.status for one in failed if one.refusal is not None} == {429}
    assert (await refused(failed[0].prefiller())).headers[-1][0] == b"retry-after"
    for one in found:
        one.cancel()
    assert len(selector) == 0


@served(flags={**FLAGS, "prefill_timeout_s": 5, "first_token_timeout_s": 5})
async def test_what_nobody_ends_ends_by_itself(site: Site) -> None:
    selector = selector_of(site)
    prefilling = selector.select(Asked("prefilling", 100))
    await prefilling.prefiller()
    unclaimed = selector.select(Asked("unclaimed", 100))
    await unclaimed.prefiller()
    unclaimed.prefilled()
    _, _ = await on_rank(selector, "silent")
    await asyncio.sleep(4.5)
    assert len(selector) == 2  # The engine of the third tells that it has nothing.
    await asyncio.sleep(1.0)
    assert len(selector) == 0
    outcomes = {one.request_id: one.outcome for one in await site.ended(3)}
    assert outcomes["silent"] is Outcome.OK
    with pytest.raises(SelectionRefusedError, match="nobody asked for its rank"):
        selector.find("unclaimed")
    assert selector.find("unclaimed") is None  # It was told once.


@served(flags={**FLAGS, "answer_timeout_s": 20, "scrape_interval_s": 1000})
async def test_an_answer_that_nobody_ends_is_bounded(site: Site) -> None:
    """Also where no engine tells what it has."""
    selector = selector_of(site)
    await on_rank(selector, "one")
    await asyncio.sleep(15.0)
    assert len(selector) == 1
    await asyncio.sleep(7.0)
    assert len(selector) == 0


@served(flags={**FLAGS, "lease_s": 15, "scrape_interval_s": 1000})
async def test_a_lease_that_ends_in_the_pool_ends_the_request(site: Site) -> None:
    selector = selector_of(site)
    held = [(await on_rank(selector, f"held{i}", prefilled=False))[0] for i in range(2 * BATCH)]
    last = selector.select(Asked("last", 50))
    await last.prefiller()
    refusal = await refused(last.rank())
    assert refusal.status == 503
    assert "prefill it again" in str(refusal)
    for one in held:
        one.ended()
    assert len(selector) == 0


@served(flags={**FLAGS, "lease_s": 30, "scrape_interval_s": 1000})
async def test_a_lease_counts_from_the_earliest_moment_at_which_it_can_have_begun(
    site: Site,
) -> None:
    """Who tells late of the end of a prefill must not pull what is another prompt's by then."""
    selector = selector_of(site)
    late, in_time = (selector.select(Asked(name, 50)) for name in ("late", "in-time"))
    await asyncio.gather(late.prefiller(), in_time.prefiller())
    await asyncio.sleep(20.0)
    assert isinstance(await in_time.rank(), Rank)
    await asyncio.sleep(11.0)  # 31 s: longer than a lease, though it was told just now.
    assert late.prefilled(50)
    assert "prefill it again" in str(await refused(late.rank()))
    in_time.ended()


@served(flags=FLAGS)
async def test_hints_name_the_only_engines(site: Site) -> None:
    selector = selector_of(site)
    instances = site.world.proxy.deployment.instances
    places = [endpoint_of(instances.prefillers[1]), endpoint_of(instances.ranks[1])]
    only = selector.eligible(places)
    assert [*only.prefillers, *only.ranks] == [1, 1]
    for i in range(BATCH):
        found = selector.select(Asked(str(i), 100, eligible=only))
        assert await found.prefiller() is instances.prefillers[1]
        assert await found.rank() is instances.ranks[1]
        found.ended()
    nobody = selector.eligible(["10.1.1.1:80"])
    assert not (nobody.prefillers)
    assert not (nobody.ranks)


@served(flags=FLAGS)
async def test_progress_follows_the_engines_counters(site: Site) -> None:
    """A request of which nobody tells is as far as its rank's counter of output tokens says."""
    selector = selector_of(site)
    await asyncio.sleep(1.0)
    found, rank = await on_rank(selector, "one", 100, max_tokens=2000)
    name = f"decode-{rank.id}"
    body = {"prompt": "a b c", "max_tokens": 400, "ignore_eos": True, "stream": True}
    port = int(endpoint_of(rank).rpartition(":")[2])
    stream = site.send("/v1/completions", body, port=port)
    await stream.tokens(200)
    assert found.session is not None, name
    seen = found.session.emitted_tokens
    assert abs(seen - len(stream.texts())) < 60, (seen, len(stream.texts()))
    ledger = site.world.proxy.deployment.driver.scheduler.ledger
    assert abs(int(ledger.loads[rank.id]) - 100 - seen) < 60
    await stream.end()
    await site.until(lambda: found.over, limit_s=5.0)  # The rank tells that it has nothing.
    (record,) = [one for one in await site.ended() if one.request_id == "one"]
    assert abs(record.output_tokens - 400) < 60


@served(flags=FLAGS)
async def test_a_caller_that_stops_waiting_and_cancels_leaves_nothing(site: Site) -> None:
    selector = selector_of(site)
    held = [(await on_rank(selector, f"held{i}"))[0] for i in range(2 * BATCH)]
    last = selector.select(Asked("last", 50))
    await last.prefiller()
    waiting = asyncio.create_task(last.rank())
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert last.cancel()
    for one in held:
        one.cancel()
    assert len(selector) == 0


@served(flags=FLAGS)
async def test_a_removed_engine_ends_what_it_has(site: Site) -> None:
    selector = selector_of(site)
    roster = site.world.proxy.deployment.roster
    found, rank = await on_rank(selector, "one")
    found.began()
    roster.drain(rank.target.role, rank.target.url)
    assert len(selector) == 1
    roster.remove(rank.target.role, rank.target.url, force=True)
    assert found.over
    pooled = selector.select(Asked("two", 100))
    prefiller = await pooled.prefiller()
    assert prefiller is not None
    roster.remove(prefiller.target.role, prefiller.target.url, force=True)
    assert pooled.over


@served(flags=FLAGS)
async def test_a_draining_proxy_takes_nothing_new(site: Site) -> None:
    selector = selector_of(site)
    site.world.proxy.deployment.driver.draining = True
    refusal = await refused(selector.select(Asked("one", 100)).prefiller())
    assert refusal.status == 503
    assert len(selector) == 0
