"""A limit on requests in flight in a proxy: who waits, how a wait ends, and what is told of it."""

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.live.frontend.gateway_requests import BODY, keys
from tests.support.site import Exchanged, Site, play, served

from balanceroute.proxy.core.events import EngineLoad, PrefillerId
from balanceroute.proxy.core.prefill.choices import Scored
from balanceroute.proxy.lab.emulate.faults import Faults
from balanceroute.proxy.lab.sim.engines import SimulatedEngineOptions

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


# Fair queueing in a proxy: one key's backlog does not hold up another key.


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        ("none", "abcdxyz"),
        ("request", "axbyczd"),
        ("prompt-tokens", "axyzbcd"),
        ("kv-token-seconds", "axyzbcd"),
    ],
)
def test_a_key_with_a_backlog_shares_the_prefiller(
    tmp_path: Path, cost: str, expected: str
) -> None:
    async def scenario(site: Site) -> None:
        def send(name: str, key: bytes, tokens: int) -> Exchanged:
            headers = [(b"x-request-id", name.encode()), (b"authorization", b"Bearer " + key)]
            values = BODY | {"prompt": list(range(100, 100 + tokens))}
            return site.send("/v1/completions", values, headers=headers)

        # The first one is in prefill while the others arrive.
        requests = [send(name, b"many", 40) for name in "abcd"]
        requests += [send(name, b"few", 15) for name in "xyz"]
        for request in requests:
            assert (await request.end()).status == 200, request.body
        names = [seen.header(b"x-request-id") for seen in site.received("prefill")]
        assert "".join(chr(name[0]) for name in names if name) == expected

    flags = {
        "fair_queue": cost,
        "probe_limit": 1,
        "api_key_file": keys(tmp_path, "keys", "many", "few"),
    }
    play(scenario, prefillers=1, flags=flags)


# A policy from outside the repository, before engines.


MODULE = """
from balanceroute.proxy.core.policies import OldestFirst

made = []

def last_rank(inputs):
    made.append(inputs.ranks)
    return OldestFirst(lambda fleet, entry: inputs.ranks - 1, slots_beyond_batch=None)

def other(inputs):
    raise AssertionError
"""
SHORT = {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True}


def test_it_decides_and_an_administrator_can_name_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_policy.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = "outside_policy:last_rank"

    async def scenario(site: Site) -> None:
        for _ in range(3):
            assert (await site.post("/v1/completions", SHORT)).status == 200
        served = {seen.engine for seen in site.received("decode", "/v1/completions")}
        assert served == {f"decode/{len(site.fleet.decode_urls) - 1}"}
        for name in ("outside_policy:other", "os:getcwd"):
            answer = await site.admin("/admin/policy", {"policy": name})
            assert answer.status == 400
            assert "is not the one that --policy names" in str(answer.json)
        assert (await site.admin("/admin/policy", {"policy": "jsq"})).status == 200
        assert (await site.admin("/admin/policy", {"policy": mine})).status == 200

    play(scenario, flags={"policy": mine})
    sys.modules.pop("outside_policy")


# With `--first-token prefill` the first token of what waits for a rank does not wait before prefill.


# Of two ranks of four slots: the limit that balance needs is 27.
CLIENTS = 48
REQUESTS = 260


@pytest.mark.parametrize(
    ("first_token", "least_s", "most_s"), [("prefill", 0, 0.3), ("decode", 5, 10)]
)
def test_a_first_token_waits_for_its_prefill_alone(
    first_token: str, least_s: float, most_s: float
) -> None:
    async def scenario(site: Site) -> None:
        def send(number: int) -> Any:
            values = {"model": "tiny", "prompt": [1 + number % 50] * 20, "max_tokens": 10}
            values |= {"ignore_eos": True, "stream": True, "temperature": 0}
            return site.send(COMPLETIONS, values)

        flying = [send(number) for number in range(CLIENTS)]
        for number in range(CLIENTS, REQUESTS):
            await flying.pop(0).end()
            flying.append(send(number))
        for one in flying:
            await one.end()
        await site.rest()
        # The rate of departures is known after a lease.
        begin_ns = min(one.arrived_ns for one in site.world.ended)
        late = [one for one in site.world.ended if one.arrived_ns > begin_ns + 32_000_000_000]
        waits = sorted(one.first_token_ns - one.arrived_ns for one in late if one.first_token_ns)
        assert len(waits) > 50
        assert least_s <= waits[len(waits) * 9 // 10] / 1e9 <= most_s
        assert {one.lease_lapses for one in site.world.ended} == {0}

    flags = {"first_token": first_token, "batch": 4, "policy": "br-0", "lease_s": 30}
    play(scenario, flags=flags, step_base_ns=150_000_000, prefill_ns_per_token=1_000.0)


def test_before_anything_is_learned_prefillers_hold_no_more_than_fits() -> None:
    """All slots are taken at once, and a deep pool begins with half as many."""
    fits, prompt = 2_000, 100

    async def scenario(site: Site) -> None:
        await asyncio.sleep(3.0)  # Engines tell once a second.
        prefillers = site.world.scheduler.prefillers
        values = {"model": "tiny", "max_tokens": 60, "ignore_eos": True, "stream": True}
        flying = [
            site.send(COMPLETIONS, values | {"prompt": [1 + number] * prompt, "temperature": 0})
            for number in range(240)
        ]
        most = [0, 0]
        while len(site.world.ended) < len(flying):
            most = [max(pair) for pair in zip(most, prefillers.held_tokens, strict=True)]
            await asyncio.sleep(0.05)
        for one in flying:
            assert (await one.end()).done
        assert {(one.lease_lapses, one.retries) for one in site.world.ended} == {(0, 0)}
        assert 0.8 * fits < min(most)
        assert max(most) <= 0.95 * fits

    flags = {"first_token": "prefill", "batch": 64, "policy": "br-0", "lease_s": 30}
    play(
        scenario,
        flags=flags,
        batch_limit=64,
        step_base_ns=150_000_000,
        prefill_ns_per_token=1_000.0,
        prefiller_kv_tokens=fits,
    )


# Prefix-aware choice of prefillers in the whole proxy, before engines with prefix caches.


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
    memory = prefillers._choice.memory  # type: ignore[attr-defined]
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


# Conversations whose turns return to the rank that has their beginning, in the whole proxy.


WORLD = {"ranks": 3, "prefix_cache_tokens": 100_000, "max_model_len": 100_000}
FLAGS: dict[str, object] = {"prefix_affinity": 1.0}
TURNS = 4
PULLED = "vllm:external_prefix_cache_hits_total{"
METRIC = "balanceroute_rank_prefix_tokens_total"


def messages(turns: int, conversation: int = 0) -> list[dict[str, object]]:
    return [
        {
            "role": "user",
            "content": " ".join(f"{conversation}{turn}{word % 100:02}" for word in range(1_000)),
        }
        for turn in range(turns)
    ]


async def talk(site: Site, *, stream: bool) -> None:
    """Have turns of three conversations at the same time, in another order each time."""
    for turns in range(1, TURNS + 1):
        exchanges = []
        for place in range(3):
            said = messages(turns, (place + turns) % 3)
            # So long that the next one comes to ranks that have something.
            body = {"model": "tiny", "messages": said, "max_tokens": 200, "ignore_eos": True}
            exchanges.append(site.send(CHAT, body | {"stream": stream}))
            await asyncio.sleep(0.5)
        for exchange in exchanges:
            assert (await exchange.end()).status == 200, exchange.body


def homes(site: Site) -> list[set[str]]:
    """Return which ranks each conversation was on."""
    seen = site.received("decode", CHAT)
    return [
        {one.engine for one in seen if one.values["messages"][0] == messages(1, number)[0]}
        for number in range(3)
    ]


@pytest.mark.parametrize(
    ("connector", "policy", "stream"),
    [
        ("nixl", "br-0", False),
        ("nixl", "br-h", True),
        ("nixl", "br-0-bypass", False),
        ("mooncake", "br-h", False),
        ("mooncake-ascend", "br-h", True),
        ("mooncake-hybrid", "br-h", False),
    ],
)
@served("connector", flags=lambda policy: FLAGS | {"policy": policy}, **WORLD)
async def test_turns_return_to_their_rank(
    site: Site, connector: str, policy: str, stream: bool
) -> None:
    await talk(site, stream=stream)
    assert [len(ranks) for ranks in homes(site)] == [1, 1, 1]
    page = (await site.get("/metrics")).body.decode()
    (line,) = (one for one in page.splitlines() if one.startswith(METRIC + " "))
    # Of three conversations the first two KiB blocks and so on, at every later turn.
    assert float(line.split()[1]) > 3 * 1_000 * (1 + 2 + 3) / 2


@pytest.mark.parametrize("flags", [{}, {"prefix_affinity": 0.0}, FLAGS | {"policy": "fifo"}])
@served("flags", **WORLD)
async def test_without_the_price_they_go_where_there_is_most_room(
    site: Site, flags: dict[str, object]
) -> None:
    await talk(site, stream=False)
    assert max(len(ranks) for ranks in homes(site)) > 1


@pytest.mark.parametrize(("connector", "paper"), [("mooncake-layerwise", False), ("nixl", True)])
@served("connector", flags=lambda paper: FLAGS | {"paper": paper}, **WORLD)
async def test_nothing_is_remembered_where_it_would_save_nothing(
    site: Site, connector: str, *, paper: bool
) -> None:
    await talk(site, stream=False)
    assert site.world.scheduler.intake.memory is None
    assert not site.world.proxy.deployment.driver._settings.uses_blocks


@pytest.mark.parametrize("session", [b"", b"one"])
@served(flags=FLAGS, **WORLD)
async def test_what_a_rank_pulls_is_what_it_lacks(site: Site, session: bytes) -> None:
    """Of a session also where its client writes earlier turns otherwise."""
    for turns in range(1, 5):
        said = messages(turns)
        if session and turns % 2:
            said = [dict(reversed(message.items())) for message in said]
        body = {"model": "tiny", "messages": said, "max_tokens": 2}
        headers = [(b"x-session-id", session)] if session else []
        assert (await site.post(CHAT, body, headers)).status == 200
        other = {"model": "tiny", "prompt": [turns] * 9, "max_tokens": 2}
        assert (await site.post(COMPLETIONS, other)).status == 200
    assert len({one.engine for one in site.received("decode", CHAT)}) == 1
    pages = [(await site.ask(f"decode/{n}", "/metrics", None, "GET")).body for n in range(3)]
    lines = b"".join(pages).decode().splitlines()
    pulled = sum(float(one.split()[-1]) for one in lines if one.startswith(PULLED))
    # 10,000 words in all, of which each of four turns adds 1,000.
    assert 0.0 < pulled < 0.5 * sum(one.prompt_tokens for one in site.world.ended)


# Engines that come back beside others under load: what they get, second by second.


BATCH = 16
FLEET: dict[str, Any] = {"ranks": 2, "batch_limit": BATCH, "step_base_ns": 50_000_000}
WARMING: dict[str, object] = {"batch": BATCH, "health_interval_s": 0.5}


def warming_body(number: int) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": f"t{number} t2",
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }


async def join(site: Site, *, cold_s: float = 0.0) -> list[int]:
    """Return what a rank gets in each tenth of a second of the first two after it came back.

    There are twice as many requests as slots. `cold_s` is what its first token takes.
    """
    asked: list[Exchanged] = []

    def send() -> None:
        asked.append(site.send(COMPLETIONS, warming_body(len(asked))))

    for _ in range(BATCH):
        send()
    await site.until(lambda: len(site.world.scheduler.ledger) == BATCH)
    site.fleet.kill("decode/1")
    await asyncio.sleep(1.0)
    for _ in range(2 * BATCH):
        send()
    if cold_s:
        site.fleet.engine("decode/1").faults = Faults(delay_s=cold_s)
    await site.fleet.restore("decode/1")
    rank = site.world.plane.deployment.instances.ranks[1]
    await site.until(lambda: rank.open)
    begin_s, before = site.loop.time(), len(site.seen)
    await asyncio.sleep(2.0)
    got = Counter(
        int(10 * (seen.at_s - begin_s))
        for seen in site.seen[before:]
        if seen.engine == "decode/1" and seen.path == COMPLETIONS
    )
    site.fleet.faults.clear()
    for one in asked:
        await one.end()
    return [got[tenth] for tenth in range(20)]


@served(flags=WARMING, **FLEET)
async def test_a_rank_that_comes_back_gets_its_full_share_within_two_seconds(site: Site) -> None:
    got = await join(site)
    # A round takes the transfer and a step of 50 ms: 1, 2, 4, 8 and the rest.
    assert sum(got[:1]) <= 3
    assert sum(got[:2]) <= 7
    assert sum(got[:10]) >= BATCH


@served(flags=WARMING | {"warm_up": False}, **FLEET)
async def test_without_the_setting_it_gets_all_at_once(site: Site) -> None:
    got = await join(site)
    assert sum(got[:1]) == BATCH


@served(flags=WARMING, **FLEET)
async def test_one_that_is_cold_gets_no_more_before_its_first_token(site: Site) -> None:
    assert sum(await join(site, cold_s=1.5)) <= 3


@served(flags=WARMING, **FLEET)
async def test_a_proxy_that_begins_serves_at_its_full_rate(site: Site) -> None:
    asked = [site.send(COMPLETIONS, warming_body(number)) for number in range(2 * BATCH)]
    await site.until(lambda: len(site.world.scheduler.ledger) == 2 * BATCH)
    begin_s = site.received("decode", COMPLETIONS)[0].at_s
    await asyncio.sleep(0.2)
    sent = site.received("decode", COMPLETIONS)
    assert len(sent) == 2 * BATCH
    # No longer than their prefills took.
    assert not site.world.scheduler.ranks.warm_up.active
    assert site.loop.time() - begin_s < 3.0
    for one in asked:
        await one.end()


# `--learn-speeds` in a proxy, whose step times are inferred from streams.


SPEED_BATCH = 4


async def keep_busy(site: Site, requests: int) -> None:
    """Keep more requests in flight than two ranks have slots, until so many have ended."""
    rng = random.Random(3)

    def send() -> Any:
        values = {
            "model": "tiny",
            "prompt": [1 + rng.randrange(9) for _ in range(rng.choice((20, 100, 400)))],
            "max_tokens": rng.randint(30, 150),
            "ignore_eos": True,
            "stream": True,
        }
        return site.send(COMPLETIONS, values)

    flying = [send() for _ in range(4 * SPEED_BATCH)]
    for _ in range(requests):
        await flying.pop(0).end()
        flying.append(send())
    for one in flying:
        await one.end()


@pytest.mark.parametrize("speeds", [(1.0, 0.6), ()])
@served(
    flags={"learn_speeds": True, "batch": SPEED_BATCH, "policy": "br-0"},
    engines=lambda speeds: SimulatedEngineOptions(rank_speeds=speeds),
    step_base_ns=5_000_000,
    step_ns_per_token=20_000.0,
)
async def test_speeds_are_learned_where_they_differ(site: Site, speeds: tuple[float, ...]) -> None:
    await keep_busy(site, 120)
    scheduler = site.world.proxy.deployment.driver.scheduler
    learned = scheduler.ranks.speeds(scheduler.config)
    if speeds:
        assert learned is not None
        assert 0.5 < learned[1] / learned[0] < 0.75
        page = (await site.get("/metrics")).body.decode()
        assert 'balanceroute_rank_speed_ratio{rank="1"' in page
    else:
        assert learned is None


# Short prompts that ranks compute in the whole proxy.


LOCAL = {"local_prefill_tokens": 200}
LOCAL_BODY = {"model": "tiny", "prompt": list(range(150)), "max_tokens": 3, "ignore_eos": True}
LONG = LOCAL_BODY | {"prompt": list(range(900))}


async def warm_up(site: Site) -> None:
    """Let a prefill be measured."""
    assert (await site.post(COMPLETIONS, LONG)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@served(flags=LOCAL)
async def test_a_rank_computes_a_short_prompt(site: Site, stream: bool) -> None:
    await warm_up(site)
    answer = await site.post(COMPLETIONS, LOCAL_BODY | {"stream": stream})
    assert answer.status == 200
    await site.until(lambda: len(site.world.ended) == 2)
    assert len(site.received("prefill", COMPLETIONS)) == 1
    pulled, computed = site.received("decode", COMPLETIONS)
    assert "kv_transfer_params" in pulled.values
    assert "kv_transfer_params" not in computed.values
    assert [record.local_prefill for record in site.world.ended] == [False, True]
    assert [record.prompt_tokens for record in site.world.ended] == [900, 150]
    page = (await site.get("/metrics")).body.decode()
    assert "balanceroute_local_prefills_total 1.0" in page


@served()
async def test_without_the_setting_prefillers_compute_all(site: Site) -> None:
    await warm_up(site)
    await site.post(COMPLETIONS, LOCAL_BODY)
    assert len(site.received("prefill", COMPLETIONS)) == 2


@served(flags=LOCAL | {"retry_attempts": 1})
async def test_short_prompts_are_served_while_no_prefiller_is_up(site: Site) -> None:
    for number in range(2):
        site.fleet.kill(f"prefill/{number}")
    for _ in range(12):  # Until health checks know.
        await site.post(COMPLETIONS, LONG)
    served = await site.post(COMPLETIONS, LOCAL_BODY)
    assert served.status == 200
    refused = await site.post(COMPLETIONS, LONG)
    assert refused.status == 503
    assert b"no engine of each role is up" in refused.body


@served(flags=LOCAL)
async def test_another_rank_computes_what_a_rank_lost(site: Site) -> None:
    await warm_up(site)
    site.fleet.kill("decode/0")
    for _ in range(3):
        assert (await site.post(COMPLETIONS, LOCAL_BODY)).status == 200
    assert {seen.engine for seen in site.received("decode")[1:]} == {"decode/1"}
    assert len(site.received("prefill", COMPLETIONS)) == 1


COMPUTING = {
    "flags": {"local_prefill_tokens": 2_000},
    "ranks": 3,
    "prefix_cache_tokens": 100_000,
    "max_model_len": 100_000,
}


def turns_of(turns: int) -> list[dict[str, object]]:
    return [
        {"role": "user", "content": " ".join(f"{turn}{word % 100:02}" for word in range(1_000))}
        for turn in range(turns)
    ]


@served(**COMPUTING)
async def test_a_conversation_returns_to_its_rank(site: Site) -> None:
    await warm_up(site)
    times_s = []
    for turns in range(1, 5):
        body = {"model": "tiny", "messages": turns_of(turns), "max_tokens": 2, "stream": True}
        begin_s = site.loop.time()
        assert (await site.post(CHAT, body)).status == 200
        times_s.append(site.loop.time() - begin_s)
    assert not site.received("prefill", CHAT)
    assert len({seen.engine for seen in site.received("decode", CHAT)}) == 1
    # 1,000 new tokens each time.
    assert max(times_s[1:]) < 1.2 * times_s[0]


@pytest.mark.parametrize(
    ("header", "members"),
    [
        ((b"x-session-id", b"one"), {}),
        ((b"x-claude-code-session-id", b"one"), {"metadata": {"user_id": "somebody"}}),
        ((b"x-app", b"cli"), {"metadata": {"user_id": '{"session_id": "one"}'}}),
        ((b"thread-id", b"one"), {"prompt_cache_key": "of all"}),
        ((b"originator", b"codex"), {"prompt_cache_key": "one"}),
    ],
)
@served(**COMPUTING)
async def test_a_session_returns_to_its_rank_however_its_client_writes_it(
    site: Site, header: tuple[bytes, bytes], members: dict[str, object]
) -> None:
    await warm_up(site)
    for turns in range(1, 5):
        said = turns_of(turns)
        if turns % 2:  # The same, to an engine.
            said = [dict(reversed(message.items())) for message in said]
        body = {"model": "tiny", "messages": said, "max_tokens": 2, "stream": True}
        assert (await site.post(CHAT, body | members, [header])).status == 200
    assert not site.received("prefill", CHAT)
    assert len({seen.engine for seen in site.received("decode", CHAT)}) == 1


# `--admission early` in a proxy: the hopeless are refused at once, and the log compares.


@pytest.mark.parametrize("connector", ["nixl", "mooncake-layerwise"])
def test_a_request_that_needs_no_prefiller_is_refused_early_too(connector: str) -> None:
    async def scenario(site: Site) -> None:
        # A prefiller's prompts take a moment, an answer 2 s on one of two ranks with a slot each.
        def send(*headers: tuple[bytes, bytes]) -> Exchanged:
            values = BODY | {"max_tokens": 20, "ignore_eos": True, "stream": True}
            return site.send(COMPLETIONS, values, headers=list(headers))

        for _ in range(3):
            await send().end()
        load = [send() for _ in range(12)]
        await load[3].end()
        begin_s = site.loop.time()
        refused = await send((b"x-request-deadline-ms", b"2000")).end()
        assert refused.status == 503
        assert "the first token is expected in" in refused.json["error"]["message"]
        assert site.loop.time() - begin_s < 0.1
        patient = send((b"x-request-deadline-ms", b"60000"))
        for one in (*load, patient):
            assert (await one.end()).done
        record = site.world.ended[-1]
        assert record.first_token_ns is not None
        assert record.expected_ttft_ns is not None
        ratio = (record.first_token_ns - record.arrived_ns) / record.expected_ttft_ns
        assert 0.6 < ratio < 1.6

    flags = {"admission": "early", "client_deadline": True, "batch": 1, "pool_limit": 2}
    play(
        scenario,
        connector=connector,
        batch_limit=1,
        step_base_ns=100_000_000,
        flags=flags | {"connector": connector},
    )


def test_what_is_expected_is_the_token_that_the_client_gets() -> None:
    async def scenario(site: Site) -> None:
        def send(*, early: bool, due: bool = False) -> Exchanged:
            values = BODY | {"max_tokens": 20, "ignore_eos": True, "stream": True, "temperature": 0}
            headers = [(b"x-request-deadline-ms", b"1000")] if due else []
            values |= {} if early else {"stop": ["never"]}
            return site.send(COMPLETIONS, values, headers=headers)

        # Each takes one of two ranks for 2 s, and all are prefilled at once.
        load = [send(early=number % 2 == 0) for number in range(16)]
        await load[-1].end()
        load += [send(early=True) for _ in range(8)]
        await load[-1].until_events(1)
        soon, late = send(early=True, due=True), send(early=False, due=True)
        assert (await late.end()).status == 503
        assert "the first token is expected in" in late.json["error"]["message"]
        for one in (*load, soon):
            assert (await one.end()).done
        ended = [one for one in await site.ended(26) if one.status == 200]
        told = [one.expected_ttft_ns for one in ended if one.early_first_token]
        assert max(one or 0 for one in told) < 1e9

    flags = {"admission": "early", "client_deadline": True, "first_token": "prefill", "batch": 1}
    play(
        scenario,
        flags=flags | {"pool_limit": 100, "lease_s": 1000.0},
        batch_limit=1,
        step_base_ns=100_000_000,
        lease_s=1000.0,
    )


@pytest.mark.parametrize("admission", ["bounded", "early"])
@served(
    prefillers=1,
    prefill_base_ns=1_000_000_000,
    flags=lambda admission: {"admission": admission, "probe_limit": 1, "client_deadline": True},
)
async def test_a_request_that_cannot_be_in_time_is_refused_at_once(
    site: Site, admission: str
) -> None:
    def send(number: int, deadline_ms: bytes | None = None) -> Exchanged:
        headers = [] if deadline_ms is None else [(b"x-request-deadline-ms", deadline_ms)]
        return site.send(
            COMPLETIONS, BODY | {"prompt": [number] * 20, "stream": True}, headers=headers
        )

    # A prefill takes a second: after some, the rate of starts is known.
    for number in range(1, 5):
        assert (await send(number).end()).status == 200
    queued = [send(10 + number) for number in range(8)]
    await queued[2].end()
    begin_s = site.loop.time()
    hopeless = await send(30, b"2000").end()
    assert hopeless.status == 503
    waited_s = site.loop.time() - begin_s
    if admission == "early":
        assert waited_s < 0.1
        assert int(hopeless.header(b"retry-after") or b"0") >= 2
        assert "the first token is expected in" in hopeless.json["error"]["message"]
    else:
        assert waited_s == pytest.approx(2.0, abs=0.3)
    patient = send(31, b"60000")
    assert (await patient.end()).status == 200
    record = site.world.ended[-1]
    assert record.first_token_ns is not None
    if admission == "early":
        assert record.expected_ttft_ns is not None
        ratio = (record.first_token_ns - record.arrived_ns) / record.expected_ttft_ns
        assert 0.7 < ratio < 1.4
    else:
        assert record.expected_ttft_ns is None
    page = (await site.get("/metrics")).body
    count = b"balanceroute_time_to_first_token_expectation_ratio_count 0"
    assert (count in page) == (admission == "bounded")
