"""Prefix-aware choice of prefillers in the whole proxy, before engines with prefix caches."""

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.core.events import EngineLoad, PrefillerId
from balanceroute.proxy.core.prefill.choices import Scored

CHAT = "/v1/chat/completions"
ENGINES = {
    "prefillers": 3,
    "prefix_cache_tokens": 100_000,
    "prompt_tokens_details": True,
    "max_model_len": 100_000,
}


def turns(number: int, count: int) -> list[dict[str, object]]:
    """Return the messages of a conversation's turn."""
    messages: list[dict[str, object]] = []
    for turn in range(count):
        text = " ".join(f"c{number}t{turn}w{word}" for word in range(1_500))
        messages += [{"role": "user", "content": text}]
    return messages


async def converse(site: Site, conversations: int, length: int) -> list[int]:
    """Return the cached tokens of each prefill, all conversations' turns in turn."""
    for count in range(1, length + 1):
        for number in range(conversations):
            body = {"model": "tiny", "messages": turns(number, count), "max_tokens": 2}
            answer = await site.post(CHAT, body)
            assert answer.status == 200, answer.body
    return [record.cached_tokens or 0 for record in site.world.ended]


@pytest.mark.parametrize("choice", ["prefix-aware", "sticky", "cache-aware", "lmetric"])
@served(flags=lambda choice: {"prefill_choice": choice}, **ENGINES)
async def test_conversations_find_their_prefixes(site: Site, choice: str) -> None:
    cached = await converse(site, conversations=4, length=3)
    first, later = cached[:4], cached[4:]
    assert max(first) == 0
    assert min(later[:4]) > 1_400
    assert min(later[4:]) > 2_900


@served(flags={"prefill_choice": "fewest-tokens"}, **ENGINES)
async def test_blind_choices_do_not(site: Site) -> None:
    cached = await converse(site, conversations=4, length=3)
    assert min(cached[4:]) == 0


@served(flags={"prefill_choice": "prefix-aware"}, **ENGINES)
async def test_engines_that_lost_their_caches_are_noticed(site: Site) -> None:
    await converse(site, conversations=3, length=1)
    prefillers = site.world.scheduler.prefillers
    memory = prefillers._choice._memory  # type: ignore[attr-defined]
    assert all(index._tables for index in memory._indices.values())
    for engine in site.fleet.engines[:3]:
        for cache in engine.work._caches._caches:
            cache._held.clear()
    body = {"model": "tiny", "messages": turns(0, 1), "max_tokens": 2}
    homes = set()
    for _ in range(2):
        await site.post(CHAT, body)
        homes.add(site.received("prefill")[-1].engine)
        for engine in site.fleet.engines[:3]:
            for cache in engine.work._caches._caches:
                cache._held.clear()
    (home,) = homes
    number = int(home.rpartition("/")[2])
    assert not memory._indices[number]._tables


@served(flags={"prefill_choice": "s1-enhanced", "prefill_waiting_limit": 1}, **ENGINES)
async def test_a_choice_by_score_is_told_what_was_scraped(site: Site) -> None:
    choice = site.world.scheduler.prefillers._choice
    assert isinstance(choice, Scored)
    for prompt in range(3):  # At the first prefiller, past the proxy.
        body = {"model": "tiny", "prompt": list(range(prompt, 30_000)), "max_tokens": 1}
        site.send("/v1/completions", body, port=site.fleet.engine("prefill/0").port)
    await site.until(lambda: len(choice._scraped) == 3)
    await site.until(lambda: choice._scraped[PrefillerId(0)] == EngineLoad(2, 1, 0))
    body = {"model": "tiny", "prompt": "why?", "max_tokens": 2}
    for _ in range(5):
        assert (await site.post("/v1/completions", body)).status == 200
    assert {seen.engine for seen in site.received("prefill")[3:]} == {"prefill/1", "prefill/2"}
