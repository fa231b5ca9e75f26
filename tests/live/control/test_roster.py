"""Engines that come and go, on an operator's word, while requests are under way."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.live.long_streams import BODY, COMPLETIONS, body, order, right, rows, streaming
from tests.support.site import Site, play, served

from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import DpMode
from balanceroute.proxy.live.control.roster import Addition
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.telemetry.record import Outcome


class Another:
    """A further fleet, whose engines nobody knows yet; its KV caches are its own."""

    def __init__(self, site: Site, **changes: Any) -> None:
        settings = replace(site.fleet.settings, **changes)
        self.fleet = EmulatedFleet(settings, rng=site.world._rng)

    async def __aenter__(self) -> EmulatedFleet:
        await self.fleet.start()
        return self.fleet

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.close()


# Drain.


@served()
async def test_a_drained_rank_finishes_what_it_has_and_gets_nothing_new(site: Site) -> None:
    exchanges = await streaming(site, 6)
    url = site.fleet.engine("decode/1").url
    answer = await site.admin("/admin/instances/drain", order(site, "decode/1"))
    assert answer.status == 200
    row = next(row for row in answer.json["instances"] if row["url"] == url)
    assert row["status"] == "draining"
    assert row["in_flight"] == 3
    assert row["drained"] is False
    before = len(site.received("decode/1"))
    later = [site.send(COMPLETIONS, body(i)) for i in range(6, 10)]
    await right(site, exchanges)
    assert (await rows(site))[url] | {"parts": []} == {
        "role": "decode",
        "url": url,
        "status": "draining",
        "reason": "",
        "still": [],
        "since": None,
        "next_probe_s": None,
        "parts": [],
        "in_flight": 0,
        "drained": True,
        "version": "0.32.0",
    }
    for exchange in later:
        assert (await exchange.end()).done
    assert len(site.received("decode/1")) == before


@served()
async def test_a_drained_rank_counts_no_more_in_what_is_lost_at_the_barrier(site: Site) -> None:
    first = await streaming(site, 6)
    await site.admin("/admin/instances/drain", order(site, "decode/1"))
    state = await site.state()
    assert [rank["at_barrier"] for rank in state["ranks"]] == [True, True]  # It still has requests.
    await right(site, first)
    before = await site.state()
    later = [site.send(COMPLETIONS, body(i)) for i in range(6, 10)]
    await asyncio.sleep(1.0)
    state = await site.state()
    assert [rank["at_barrier"] for rank in state["ranks"]] == [True, False]
    assert state["ranks"][0]["kv_tokens"] > 0
    assert state["imbalance_tokens"] == 0
    for exchange in later:
        assert (await exchange.end()).done
    after = await site.state()
    assert after["capacity_tokens"] > before["capacity_tokens"]
    assert after["idle_tokens"] == before["idle_tokens"]
    await site.admin("/admin/instances", order(site, "decode/1"))  # Empty, and to be filled.
    assert [one["at_barrier"] for one in (await site.state())["ranks"]] == [True, True]


@served(prefill_base_ns=500_000_000)
async def test_a_drained_prefiller_finishes_its_probes_and_gets_no_new_one(site: Site) -> None:
    exchanges = [site.send(COMPLETIONS, body(i)) for i in range(4)]
    await site.until(lambda: len(site.received("prefill")) == 4)
    answer = await site.admin("/admin/instances/drain", order(site, "prefill/0"))
    url = site.fleet.engine("prefill/0").url
    row = next(row for row in answer.json["instances"] if row["url"] == url)
    assert (row["in_flight"], row["drained"]) == (2, False)
    later = [site.send(COMPLETIONS, body(i)) for i in range(4, 8)]
    await right(site, exchanges)
    for exchange in later:
        assert (await exchange.end()).done
    assert len(site.received("prefill/0")) == 2
    assert len(site.received("prefill/1")) == 6
    assert (await rows(site))[url]["drained"] is True


@served(flags={"batch": 1})
async def test_a_kv_cache_on_a_drained_prefiller_can_still_be_pulled(site: Site) -> None:
    # One slot a rank: the third and fourth wait in the pool.
    exchanges = await streaming(site, 2)
    exchanges += [site.send(COMPLETIONS, body(i)) for i in range(2, 4)]
    await site.until(lambda: len(site.world.scheduler.pool) == 2)
    answer = await site.admin("/admin/instances/drain", order(site, "prefill/0"))
    rows = [row for row in answer.json["instances"] if row["role"] == "prefill"]
    assert [row["in_flight"] for row in rows] == [1, 1]
    assert rows[0]["drained"] is False
    await right(site, exchanges)
    assert len(site.received("prefill")) == 4
    assert site.fleet.stats()["leases"]["pulled"] == 4


@served()
async def test_a_drained_engine_can_be_taken_back(site: Site) -> None:
    await site.admin("/admin/instances/drain", order(site, "decode/0"))
    await right(site, await streaming(site, 2))
    assert site.received("decode/0")[:-2] == []
    answer = await site.admin("/admin/instances", order(site, "decode/0"))
    assert answer.status == 200
    assert (await rows(site))[site.fleet.engine("decode/0").url]["status"] == "up"
    site.seen.clear()
    await right(site, await streaming(site, 4))
    assert len({seen.engine for seen in site.received("decode")}) == 2


# Remove.


@served()
async def test_a_busy_engine_is_not_removed_without_force(site: Site) -> None:
    exchanges = await streaming(site, 2)
    refused = await site.admin("/admin/instances/remove", order(site, "decode/0"))
    assert refused.status == 409
    assert "in flight" in refused.json["error"]["message"]
    assert (await rows(site))[site.fleet.engine("decode/0").url]["status"] == "up"
    await right(site, exchanges)
    removed = await site.admin("/admin/instances/remove", order(site, "decode/0"))
    assert removed.status == 200
    assert site.fleet.engine("decode/0").url not in await rows(site)


@served()
async def test_a_removed_rank_is_never_used_again(site: Site) -> None:
    assert (await site.admin("/admin/instances/remove", order(site, "decode/1"))).status == 200
    await right(site, await streaming(site, 4))
    assert site.received("decode/1") == []
    # Not even its health is looked at, and no connection to it is kept.
    await site.until(lambda: site.fleet.stats()["connections"][3] == 0)
    before = site.loop.time()
    site.fleet.kill("decode/1")
    await asyncio.sleep(10.0)
    assert site.loop.time() > before
    assert [state.reason for state in site.world.proxy.deployment.health.states()] == [""] * 3
    assert site.world.scheduler.ledger.loads[1] == 0


@served(transfer_base_ns=2_000_000_000)
async def test_removing_a_rank_by_force_repairs_what_has_no_byte_yet(site: Site) -> None:
    # Of transfers that take 2 s: both are admitted, and neither has an event.
    exchanges = [site.send(COMPLETIONS, body(i)) for i in range(2)]
    await site.until(lambda: len(site.received("decode")) == 2)
    answer = await site.admin("/admin/instances/remove", order(site, "decode/0") | {"force": True})
    assert answer.status == 200
    await site.until(lambda: site.fleet.engine("decode/0").idle, limit_s=0.1)
    await right(site, exchanges)
    retried = [record for record in site.world.ended if record.retries]
    assert [record.outcome for record in retried] == [Outcome.OK]
    # The lease went with the pull that the first rank gave up: it is offered to nobody else.
    assert len(site.received("decode/1")) == 2
    assert site.fleet.misreads == []
    assert len(site.received("prefill")) == 3
    # The engine is not to blame.
    assert all(not state.reason for state in site.world.proxy.deployment.health.states())


@served()
async def test_removing_a_rank_by_force_ends_its_streams_truthfully(site: Site) -> None:
    exchanges = await streaming(site, 2)
    await site.admin("/admin/instances/remove", order(site, "decode/0") | {"force": True})
    endings = []
    for i, exchange in enumerate(exchanges):
        await exchange.end()
        endings.append(exchange.done)
        alone = await site.ask("decode/0", COMPLETIONS, body(i))
        if exchange.done:
            assert exchange.text == alone.text
            continue
        assert exchange.error is not None
        *said, last = exchange.chunks
        assert last["error"]["code"] == 502
        assert "removed" in last["error"]["message"]
        assert alone.chunks[: len(said)] != []
        assert alone.text.startswith("".join(chunk["choices"][0]["text"] for chunk in said))
    assert sorted(endings) == [False, True]
    assert site.fleet.engine("decode/0").idle


@pytest.mark.parametrize("phase", ["prefilling", "pooled"])
@served(flags={"batch": 1})
async def test_removing_a_prefiller_by_force_prefills_elsewhere(site: Site, phase: str) -> None:
    exchanges = []
    if phase == "pooled":
        exchanges = await streaming(site, 2)
    exchanges += [site.send(COMPLETIONS, body(i)) for i in range(len(exchanges), 4)]
    if phase == "pooled":
        await site.until(lambda: len(site.world.scheduler.pool) == 2)
    else:
        await site.until(lambda: len(site.received("prefill")) == 4)
    answer = await site.admin("/admin/instances/remove", order(site, "prefill/0") | {"force": True})
    assert answer.status == 200
    count = len(site.received("prefill/0"))
    await right(site, exchanges)
    assert len(site.received("prefill/0")) == count
    assert len(site.received("prefill/1")) == (3 if phase == "pooled" else 4)
    assert {record.outcome for record in site.world.ended} == {Outcome.OK}


@served(prefillers=1, flags={"queue_ttl_s": 5.0})
async def test_removing_the_last_prefiller_by_force_leaves_nobody_waiting_for_long(
    site: Site,
) -> None:
    exchange = site.send(COMPLETIONS, BODY)
    await site.until(lambda: len(site.received("prefill")) == 1)
    await site.admin("/admin/instances/remove", order(site, "prefill/0") | {"force": True})
    await exchange.end()
    assert exchange.status == 503
    assert exchange.header(b"retry-after") == b"1"
    refused = await site.send(COMPLETIONS, BODY).end()
    assert refused.status == 503


@pytest.mark.parametrize("page", ["drain", "remove"])
@served()
async def test_an_engine_that_is_not_there_is_404(site: Site, page: str) -> None:
    for role, url in (
        ("decode", "http://127.0.0.1:9"),
        ("prefill", site.fleet.decode_urls[0]),
        ("decode", site.fleet.prefill_urls[0]),
    ):
        answer = await site.admin(f"/admin/instances/{page}", {"role": role, "url": url})
        assert answer.status == 404
    removed = order(site, "decode/0")
    assert (await site.admin("/admin/instances/remove", removed)).status == 200
    assert (await site.admin(f"/admin/instances/{page}", removed)).status == 404


# Add.


@served()
async def test_an_engine_that_is_there_is_not_added_twice(site: Site) -> None:
    for engine in ("decode/0", "prefill/0"):
        answer = await site.admin("/admin/instances", order(site, engine))
        assert answer.status == 409
    assert len(await rows(site)) == 4


@served()
async def test_one_engine_added_twice_at_a_time_is_added_once(site: Site) -> None:
    async with Another(site, prefillers=0, ranks=1) as other:
        new = {"role": "decode", "url": other.decode_urls[0]}
        # Without a number of ranks each asks the engine first.
        answers = await asyncio.gather(*(site.admin("/admin/instances", new) for _ in range(2)))
        assert sorted(answer.status for answer in answers) == [200, 409]
        assert len(await rows(site)) == 5
        state = await site.state()
        assert len(state["ranks"]) == 3


@served()
async def test_added_engines_take_requests_at_once(site: Site) -> None:
    before = await streaming(site, 4, max_tokens=200)
    for engine in ("decode/1", "prefill/1"):
        await site.admin("/admin/instances/remove", order(site, engine) | {"force": True})
    for engine in ("prefill/1", "decode/1"):
        ranks = {"ranks": 1} if engine == "decode/1" else {}
        answer = await site.admin("/admin/instances", order(site, engine) | ranks)
        assert answer.status == 200, answer.body
    site.seen.clear()
    later = await streaming(site, 8)
    # Each begins with one, and has more with its first tokens.
    assert len(site.received("decode/1")) >= 1
    assert len(site.received("prefill/1")) >= 1
    await right(site, later)
    ended = [(await exchange.end()).done for exchange in before]
    assert sorted(ended) == [False, False, True, True]
    # A number is never used again: rank 1 is gone, the same engine is rank 2 now.
    state = await site.state()
    assert [rank["status"] for rank in state["ranks"]] == ["up", "removed", "up"]
    assert [one["status"] for one in state["prefillers"]] == ["up", "removed", "up"]


@served()
async def test_a_server_that_is_added_tells_its_ranks(site: Site) -> None:
    async with Another(site, prefillers=0, ranks=3, dp_mode=DpMode.HEADER) as other:
        url = other.decode_urls[0].partition("@")[0]
        answer = await site.admin("/admin/instances", {"role": "decode", "url": url})
        assert answer.status == 200
        assert (await rows(site))[url]["parts"] == [f"{url}@{rank}" for rank in range(3)]
        await site.admin("/admin/instances/remove", order(site, "decode/0"))
        await site.admin("/admin/instances/remove", order(site, "decode/1"))
        direct = {"prompt": ["t1", "t2"]}  # Its KV caches are not those of these prefillers.
        for exchange in await streaming(site, 6, **direct):
            assert (await exchange.end()).done
        ranks = [seen.header(b"x-data-parallel-rank") for seen in site.received("decode")]
        assert sorted(ranks, key=str) == [b"0"] * 2 + [b"1"] * 2 + [b"2"] * 2


@pytest.mark.parametrize("status", [404, 500])
@served()
async def test_a_server_that_does_not_tell_its_ranks_is_not_added(site: Site, status: int) -> None:
    async with Another(site, prefillers=0, ranks=1) as other:
        site.handlers[b"/metrics"] = lambda _, __, reply: reply.send(status, [], b"")
        new = {"role": "decode", "url": other.decode_urls[0]}
        answer = await site.admin("/admin/instances", new)
        assert answer.status == 400
        assert "cannot discover" in answer.json["error"]["message"]
        assert len(await rows(site)) == 4


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "http://",
        "ftp://a",
        "http://u:p@h:1",
        "http://h:1/path",
        "http://h:1@2",
        "http://h:0",
    ],
)
@served()
async def test_an_address_that_is_none_is_refused(site: Site, url: str) -> None:
    for role in ("prefill", "decode"):
        answer = await site.admin("/admin/instances", {"role": role, "url": url})
        assert answer.status == 400
        assert b"u:p" not in answer.body
        # What is wrong, not only how.
        assert answer.json["error"]["message"].startswith(("url ", "http://h:1@2: give"))


@pytest.mark.parametrize(
    "more",
    [
        {"role": "prefill", "ranks": 2},
        {"role": "decode", "bootstrap": "http://127.0.0.1:9", "ranks": 1},
        {"role": "prefill", "bootstrap": "http://127.0.0.1:9"},  # NIXL has none.
        {"role": "prefill", "kv_events": "tcp://127.0.0.1:9"},  # This proxy follows none.
        {"role": "decode", "kv_events": "tcp://127.0.0.1:9", "ranks": 1},
    ],
)
@served()
async def test_what_an_engine_cannot_have_is_refused(site: Site, more: dict[str, object]) -> None:
    answer = await site.admin("/admin/instances", {"url": "http://127.0.0.1:8"} | more)
    assert answer.status == 400
    assert len(await rows(site)) == 4


# Policy and state.


@served(flags={"batch": 4, "policy": "round-robin"})
async def test_the_policy_can_be_changed_with_requests_under_way(site: Site) -> None:
    exchanges = []
    policies = [
        "br-0",
        "jsq",
        "br-h",
        "least-kv",
        "fifo",
        "br-0-bypass",
        "power-of-two",
        "random",
    ]
    for i, policy in enumerate(policies):
        exchanges += [site.send(COMPLETIONS, body(3 * i + k)) for k in range(3)]
        await exchanges[-1].until_events(1)
        answer = await site.admin("/admin/policy", {"policy": policy})
        assert answer.status == 200
        site.world.scheduler.check()
        assert (await site.state())["policy"] == policy
    await right(site, exchanges)
    refused = await site.admin("/admin/policy", {"policy": "no-such"})
    assert refused.status == 400
    assert (await site.state())["policy"] == "random"


@served(batch_limit=2, flags={"batch": 2, "policy": "jsq"})
async def test_a_late_binding_policy_gets_what_an_early_one_overbooked(site: Site) -> None:
    exchanges = await streaming(site, 2)
    exchanges += [site.send(COMPLETIONS, body(i)) for i in range(2, 12)]
    await site.until(lambda: len(site.received("decode")) == 12)
    await site.admin("/admin/policy", {"policy": "br-0"})
    exchanges += [site.send(COMPLETIONS, body(i)) for i in range(12, 14)]
    await right(site, exchanges)


@served(prefill_base_ns=200_000_000, flags={"batch": 1, "pool_limit": 3})
async def test_the_state_shows_every_request_on_its_way(site: Site) -> None:
    first = await streaming(site, 2, max_tokens=400)
    pooled = [site.send(COMPLETIONS, body(i)) for i in range(2, 4)]
    await site.until(lambda: len(site.world.scheduler.pool) == 2)
    later = [site.send(COMPLETIONS, body(i)) for i in range(4, 6)]
    await site.until(lambda: len(site.received("prefill")) == 5)
    state = await site.state()
    assert [state[name] for name in ("queued", "prefilling", "pooled", "decoding")] == [
        1,
        1,
        2,
        2,
    ]
    assert [rank["bound"] for rank in state["ranks"]] == [1, 1]
    assert [rank["started"] for rank in state["ranks"]] == [1, 1]
    assert [rank["free_slots"] for rank in state["ranks"]] == [0, 0]
    assert sum(one["probes"] for one in state["prefillers"]) == 1
    assert sum(one["held_tokens"] for one in state["prefillers"]) > 0
    requests = state["requests"]
    assert [one["state"] for one in requests] == [
        "decoding",
        "decoding",
        "pooled",
        "pooled",
        "prefilling",
        "queued",
    ]
    assert all(one["request_id"] for one in requests)
    assert [bool(one["rank"]) for one in requests] == [True] * 2 + [False] * 4
    assert [bool(one["prefiller"]) for one in requests] == [True] * 5 + [False]
    assert all(one["emitted_tokens"] >= 3 for one in requests[:2])
    assert state["client_connections"] == 6
    assert state["draining"] is False
    quiet = (await site.admin("/admin/state")).json["state"]
    assert quiet["requests"] == []
    for exchange in first + pooled + later:
        await exchange.end()


@served()
async def test_at_rest_everything_is_zero(site: Site) -> None:
    exchanges = await streaming(site, 8)
    for exchange in exchanges[::2]:
        exchange.call.abort()
    for exchange in exchanges[1::2]:
        await exchange.end()
    await site.rest()
    state = await site.state()
    for name in ("queued", "prefilling", "pooled", "decoding", "imbalance_tokens"):
        assert state[name] == 0
    assert state["oldest_pooled_s"] == 0.0
    assert state["requests"] == []
    for rank in state["ranks"]:
        assert (rank["kv_tokens"], rank["bound"], rank["started"]) == (0, 0, 0)
        assert rank["free_slots"] == 256
    for prefiller in state["prefillers"]:
        assert (prefiller["probes"], prefiller["held_tokens"]) == (0, 0)
    assert state["steps"] > 0
    assert state["capacity_tokens"] > state["idle_tokens"] >= 0


@pytest.mark.parametrize("removed", ["prefill/0", "decode/0"])
@served(flags={"retry_backoff_s": 5.0, "retry_backoff_limit_s": 5.0})
async def test_an_engine_removed_while_a_retry_waits_is_not_lost_twice(
    site: Site, removed: str
) -> None:
    site.fleet.faults.set("decode", status_500=1.0)
    exchange = site.send(COMPLETIONS, BODY)
    await site.until(lambda: len(site.received("decode")) == 1)
    await asyncio.sleep(0.1)  # The rank has answered; the next try comes after 5 s.
    site.fleet.faults.clear()
    (prefill,) = site.received("prefill")
    (decode,) = site.received("decode")
    engine = prefill.engine if removed.startswith("prefill") else decode.engine
    answer = await site.admin("/admin/instances/remove", order(site, engine))
    assert answer.status == 409
    begin_s = site.loop.time()
    await site.admin("/admin/instances/remove", order(site, engine) | {"force": True})
    assert (await exchange.end()).done
    assert site.loop.time() - begin_s < 4.0
    await asyncio.sleep(10.0)
    assert {seen.engine for seen in site.seen[2:]}.isdisjoint({engine})
    assert len(site.received("prefill")) == 2


@served()
async def test_answers_that_are_not_streamed_are_repaired_too(site: Site) -> None:
    whole = [site.send(COMPLETIONS, body(i, stream=False)) for i in range(4)]
    await site.until(lambda: sum(site.fleet.stats()["running"]) == 4)
    await asyncio.sleep(0.5)
    await site.admin("/admin/instances/remove", order(site, "decode/0") | {"force": True})
    for i, exchange in enumerate(whole):
        await exchange.end()
        alone = await site.ask("decode/1", COMPLETIONS, body(i, stream=False))
        assert exchange.status == 200
        assert exchange.text == alone.text
    assert len(site.received("decode/0")) == 2


@served()
async def test_an_addition_under_way_ends_with_the_proxy(site: Site) -> None:
    async with Another(site, prefillers=0, ranks=1) as other:
        held: list[Any] = []
        site.handlers[b"/metrics"] = lambda _, __, reply: held.append(reply)
        await asyncio.sleep(2.0)
        held.clear()
        exchange = site.send(
            "/admin/instances",
            {"role": "decode", "url": other.decode_urls[0]},
            headers=[(b"content-type", b"application/json")],
            port=site.world.proxy.admin.port if site.world.proxy.admin else 0,
        )
        await site.until(lambda: bool(held))
        await site.world.proxy.close()
        for reply in held:
            reply.send(200, [], b'vllm:kv_cache_usage_perc{engine="0"} 0.1\n')
        await exchange.end()
        await asyncio.sleep(2.0)
        assert len(site.world.proxy.deployment.instances.ranks) == 2


@served(flags={"batch": 1})
async def test_a_role_that_is_drained_lets_running_requests_finish_and_refuses_the_others(
    site: Site,
) -> None:
    running = await streaming(site, 2, max_tokens=1000)
    waiting = [site.send(COMPLETIONS, body(i)) for i in range(2, 4)]
    await site.until(lambda: len(site.world.scheduler.pool) == 2)
    for engine in ("decode/0", "decode/1"):
        await site.admin("/admin/instances/drain", order(site, engine))
    for exchange in waiting:
        assert (await exchange.end()).status == 503
    await right(site, running, max_tokens=1000)


def test_a_quarantine_is_told_and_a_role_that_has_nobody_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(site: Site) -> None:
        engines = [engine for engine in site.fleet.engines if engine.name.startswith("prefill")]
        for engine in engines:
            site.fleet.kill(engine.name)
        proxy = site.world.proxy
        await site.until(lambda: not proxy.ready, limit_s=30.0)
        row = (await rows(site))[engines[0].url]
        assert row["status"] == "quarantined"
        assert row["reason"]
        assert 0.0 <= row["next_probe_s"] <= 31.0
        (told,) = proxy.snapshots(requests=False).values()
        shown = told.prefillers[0].quarantine
        assert (shown.reason, shown.since) == (row["reason"], row["since"])
        assert told.ranks[0].quarantine.since is None
        for engine in engines:
            await site.fleet.restore(engine.name)
        await site.until(lambda: proxy.deployment.instances.missing == set(), limit_s=60.0)
        row = (await rows(site))[engines[0].url]
        assert row["since"] == shown.since
        said = [r.getMessage() for r in caplog.records if "role" in r.getMessage()]
        assert said == [
            "no engine of a role is up",
            "the fleet is ready: an engine of each role is up",
        ]

    with caplog.at_level("WARNING", "balanceroute"):
        play(scenario)


@pytest.mark.parametrize("ranks", [1_025, 10_000, 100_000, 10_000_000])
@pytest.mark.parametrize("path", ["/admin/instances", "/workers"])
@served()
async def test_an_order_of_too_many_ranks_is_refused(site: Site, path: str, ranks: int) -> None:
    url = "http://127.0.0.1:9777"
    values = {"url": url, "ranks": ranks}
    values |= {"worker_type": "decode"} if path == "/workers" else {"role": "decode"}
    answer = await site.admin(path, values)
    message = answer.json["error"]["message"]
    assert answer.status == 400
    assert message == f"{url}: ranks is {ranks}, must be from 1 to 1024"
    state = await site.state()
    assert len(state["ranks"]) == 2


@served()
async def test_the_fleet_has_a_limit_too(site: Site) -> None:
    roster = site.world.plane.deployment.roster
    servers = [Addition(Role.DECODE, f"http://127.0.0.1:{n}", 1_024) for n in range(1, 12)]
    reasons = roster.add_all(servers)
    assert reasons[:9] == [None] * 9
    assert [str(reason) for reason in reasons[9:]] == [
        f"http://127.0.0.1:{port}: ranks is 1024: the fleet may have 10000 ranks, of which 782 are left"
        for port in (10, 11)
    ]
    with roster.one_change():
        for server in servers[:9]:
            roster.remove(Role.DECODE, server.url, force=False)
    assert len(roster.instances.serving()) == 2


def test_several_changes_cost_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = 0

    async def scenario(site: Site) -> None:
        nonlocal judged
        roster = site.world.plane.deployment.roster
        update = roster.pairing.update

        def count() -> None:
            nonlocal judged
            judged += 1
            update()

        monkeypatch.setattr(roster.pairing, "update", count)
        urls = [f"http://127.0.0.1:{port}" for port in range(1, 31)]
        assert roster.add_all([Addition(Role.PREFILL, url) for url in urls]) == [None] * 30
        assert judged == 1
        # Nobody is there: all are found out within a second.
        health = roster._health
        await site.until(lambda: not any(health.is_up(Target(Role.PREFILL, url)) for url in urls))
        await asyncio.sleep(0.2)
        assert judged <= 1 + 14
        judged = 0
        idle = roster.remove_idle([Target(Role.PREFILL, url) for url in urls])
        assert (len(idle), judged) == (30, 1)

    play(scenario)
