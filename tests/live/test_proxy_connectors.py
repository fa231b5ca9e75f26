"""Every connector through the whole proxy: what each leg is told, and what becomes of failures."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.chaos.expectation import comparable
from tests.support.site import Exchanged, Site, play, served

from balanceroute.proxy.lab.emulate.settings import DpMode, Preemption
from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.topologies import CONNECTORS

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ID: "Headers" = [(b"x-request-id", b"mine")]
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 20,
    "ignore_eos": True,
}
TALK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "max_tokens": 20,
    "ignore_eos": True,
}
VLLM = ("nixl", "mooncake")
BY_PATH = {COMPLETIONS: BODY, CHAT: TALK}
PULL_KEYS = {
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
}


async def alone(site: Site, path: str, values: dict[str, Any]) -> Exchanged:
    """Return what one engine answers by itself; the fleet must be without faults."""
    port = site.fleet.engine("decode/0").port
    answer = await site.send(path, values, headers=ID, port=port).end()
    assert answer.status == 200
    site.seen.pop()
    return answer


def another(values: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a request with the same answer that counts as another prompt, by a bias of nothing."""
    return values | {"logit_bias": {str(number): 0}}


def same(one: Exchanged, other: Exchanged) -> None:
    """Check that two answers are the same, event by event."""
    assert one.error is None
    assert (one.status, other.status) == (200, 200), one.body
    assert comparable(one.body, "mine") == comparable(other.body, "mine")


def usage(exchanged: Exchanged) -> tuple[int, int]:
    """Return the prompt and completion tokens that an answer tells."""
    messages = exchanged.chunks if exchanged.events else [exchanged.json]
    told = [message["usage"] for message in messages if message.get("usage")][-1]
    assert told["total_tokens"] == told["prompt_tokens"] + told["completion_tokens"]
    return told["prompt_tokens"], told["completion_tokens"]


# The way through.


@pytest.mark.parametrize("dp_mode", DpMode)
@pytest.mark.parametrize("connector", CONNECTORS)
@served("connector", "dp_mode")
async def test_the_answer_is_that_of_one_engine(
    site: Site, connector: str, dp_mode: DpMode
) -> None:
    await asyncio.sleep(1.0)
    for path, values in BY_PATH.items():
        for more in ({}, {"stream": True}, USAGE, {"n": 2}, {"n": 2, **USAGE}):
            right = await alone(site, path, values | more)
            same(await site.post(path, values | more, ID), right)
    assert {record.retries for record in site.world.ended} == {0}
    # One engine did the requests of several sequences: a rank, or vllm-ascend's a prefiller.
    whole = {"prefill": 0, "decode": 4} if connector in VLLM else {"prefill": 4, "decode": 0}
    assert {role: len(site.received(role)) - 6 for role in whole} == whole
    leases = site.fleet.stats()["leases"]
    assert leases["held"] == leases["expired"] == leases["lost"] == 0


@served(connector="nixl")
async def test_nixl_passes_on_what_the_prefiller_returned(site: Site) -> None:
    await site.post(COMPLETIONS, BODY, ID)
    prefill, decode = site.seen
    assert prefill.values == BODY | {
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    params = decode.values["kv_transfer_params"]
    assert params.keys() >= PULL_KEYS | {"tp_size", "transfer_mode"}
    assert params["remote_engine_id"] == site.fleet.engine(prefill.engine).engine_id
    assert decode.values == BODY | {"kv_transfer_params": params}
    assert site.fleet.stats()["leases"]["pulled"] == 1


@served(connector="mooncake-ascend")
async def test_mooncake_on_ascend_passes_on_its_own_keys(site: Site) -> None:
    await site.post(COMPLETIONS, BODY, ID)
    decode = site.received("decode")[0]
    params = decode.values["kv_transfer_params"]
    assert params.keys() >= PULL_KEYS | {"last_token_id", "num_prompt_blocks"}


@served(connector="mooncake")
async def test_mooncake_names_the_transfer_and_the_engine(site: Site) -> None:
    await asyncio.sleep(1.0)
    for _ in range(2):
        await site.post(COMPLETIONS, BODY, ID)
    legs = [seen.values["kv_transfer_params"] for seen in site.seen]
    prefills, decodes = legs[::2], legs[1::2]
    for prefill, decode, seen in zip(prefills, decodes, site.seen[::2], strict=True):
        engine = site.fleet.engine(seen.engine)
        transfer = prefill["transfer_id"]
        assert prefill == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer,
        }
        assert decode == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": engine.bootstrap_url,
            "remote_engine_id": engine.engine_id,
            "transfer_id": transfer,
        }
    assert len({leg["transfer_id"] for leg in prefills}) == 2


# Mooncake's bootstrap servers.


@served(connector="mooncake")
async def test_a_mooncake_prefiller_is_not_used_before_it_is_known(site: Site) -> None:
    # Sent at once: the bootstrap servers have not been asked yet.
    exchange = site.send(COMPLETIONS, BODY | USAGE, headers=ID)
    assert [one.open for one in site.world.proxy.deployment.instances.prefillers] == [
        False,
        False,
    ]
    same(await exchange.end(), await alone(site, COMPLETIONS, BODY | USAGE))
    assert site.fleet.stats()["leases"]["pulled"] == 1


@pytest.mark.parametrize("down_s", [0.0, 12.0])
@served(connector="mooncake")
async def test_a_restarted_mooncake_prefiller_has_a_new_id(site: Site, down_s: float) -> None:
    await asyncio.sleep(1.0)
    assert (await site.post(COMPLETIONS, BODY, ID)).status == 200
    for name in ("prefill/0", "prefill/1"):
        site.fleet.kill(name)
    await asyncio.sleep(down_s)
    for name in ("prefill/0", "prefill/1"):
        await site.fleet.restore(name)
    # Nobody may notice a restart that is over within a moment, but the id is asked for again.
    await asyncio.sleep(20.0 if down_s else 1.5)
    for exchange in [site.send(COMPLETIONS, BODY | USAGE) for _ in range(4)]:
        assert (await exchange.end()).done
    assert {record.retries for record in site.world.ended} == {0}
    assert {seen.engine for seen in site.received("prefill")} == {"prefill/0", "prefill/1"}
    assert site.fleet.stats()["leases"]["pulled"] == 5


@served(connector="mooncake")
async def test_a_mooncake_prefiller_without_a_bootstrap_server_is_not_used(site: Site) -> None:
    engine = site.fleet.engine("prefill/0")
    engine._servers[1].close()
    await asyncio.sleep(1.0)
    for exchange in [site.send(COMPLETIONS, BODY) for _ in range(4)]:
        assert (await exchange.end()).status == 200
    assert {seen.engine for seen in site.received("prefill")} == {"prefill/1"}


@served(connector="mooncake")
async def test_a_mooncake_prefiller_can_be_added(site: Site) -> None:
    await asyncio.sleep(1.0)
    engine = site.fleet.engine("prefill/1")
    order = {"role": "prefill", "url": engine.url}
    assert (await site.admin("/admin/instances/remove", order)).status == 200
    added = await site.admin("/admin/instances", order | {"bootstrap": engine.bootstrap_url})
    assert added.status == 200
    await asyncio.sleep(1.5)
    for exchange in [site.send(COMPLETIONS, BODY) for _ in range(4)]:
        assert (await exchange.end()).status == 200
    assert len(site.received("prefill/1")) == 2
    assert site.fleet.stats()["leases"]["pulled"] == 4
    # Without a word on it, it is where vLLM has it.
    await site.admin("/admin/instances/remove", order)
    assert (await site.admin("/admin/instances", order)).status == 200
    known = [one.bootstrap for one in site.world.proxy.deployment.instances.prefillers]
    assert known[-1] == "http://127.0.0.1:8998"
    assert not site.world.proxy.deployment.instances.prefillers[-1].open


# Leases and parameters that fail.


@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
@served("connector", flags={"direct": "decode"})
async def test_a_prefill_without_parameters_is_computed_by_the_rank(
    site: Site, connector: str
) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    same(await site.post(COMPLETIONS, BODY | USAGE, ID), right)
    assert "kv_transfer_params" not in site.received("decode")[0].values


@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
@served("connector", flags={"on_missing_kv": "fail"})
async def test_if_told_so_it_is_prefilled_again_instead(site: Site, connector: str) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    site.fleet.faults.set("prefill/0", drop_kv_params=1.0)
    for _ in range(2):
        same(await site.post(COMPLETIONS, BODY | USAGE, ID), right)
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    failed = await site.post(COMPLETIONS, BODY | USAGE, ID)
    assert failed.status == 502
    assert "kv_transfer_params" in failed.json["error"]["message"]


@pytest.mark.parametrize(
    ("connector", "fault", "legs"),
    [
        ("nixl", {"prefill": {"alien_kv_params": 1.0}}, ("prefill", 2)),
        ("mooncake-ascend", {"prefill": {"alien_kv_params": 1.0}}, ("prefill", 2)),
        # A rank that never calls back is given up.
        ("mooncake-layerwise", {"decode": {"hang": True}}, ("decode", 2)),
    ],
)
@served("connector", flags={"first_token_timeout_s": 2.0, "prefill_timeout_s": 3.0})
async def test_what_fails_before_the_first_byte_is_done_once_more(
    site: Site, connector: str, fault: dict[str, dict[str, Any]], legs: tuple[str, int]
) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    ((role, kind),) = fault.items()
    site.fleet.faults.set(role, **kind)
    exchange = site.send(COMPLETIONS, BODY | USAGE, headers=ID)
    await site.until(lambda: len(site.received("decode")) == (2 if "hang" in kind else 1))
    site.fleet.faults.clear()
    same(await exchange.end(), right)
    assert len({seen.engine for seen in site.received(legs[0])}) == legs[1]


# Requests that a rank hands back.


@pytest.mark.parametrize("connector", ["mooncake-ascend", "mooncake-layerwise"])
@pytest.mark.parametrize("path", BY_PATH)
@pytest.mark.parametrize("after", [0, 1, 7])
@served("connector")
async def test_a_request_that_is_handed_back_goes_on_unbroken(
    site: Site, connector: str, path: str, after: int
) -> None:
    values = BY_PATH[path] | USAGE
    right = await alone(site, path, values)
    site.fleet.faults.set("decode", recomputed_after_tokens=after)
    exchange = site.send(path, values, headers=ID)
    await site.until(lambda: len(site.received("decode")) == 1)
    site.fleet.faults.clear()
    same(await exchange.end(), right)
    assert exchange.done
    assert usage(exchange) == usage(right)
    assert usage(exchange)[1] == 20
    second = site.received("decode")[1].values
    if after:
        assert second["max_tokens"] == 20 - after
    (record,) = site.world.ended
    assert (record.recomputes, record.outcome) == (1, Outcome.OK)
    assert (record.prompt_tokens, record.output_tokens) == usage(right)
    # A layerwise rank that hands back at once has called for no prefill yet.
    at_once = after == 0 and connector == "mooncake-layerwise"
    assert len(site.received("prefill")) == (1 if at_once else 2)


@pytest.mark.parametrize("path", BY_PATH)
@served(connector="mooncake-ascend")
async def test_handed_back_many_times_the_limit_still_holds(site: Site, path: str) -> None:
    values = BY_PATH[path] | USAGE
    right = await alone(site, path, values)
    site.fleet.faults.set("decode", recomputed_after_tokens=3)
    exchange = await site.post(path, values, ID)
    same(exchange, right)
    limits = [seen.values["max_tokens"] for seen in site.received("decode")]
    assert limits == [20, 17, 14, 11, 8, 5, 2]
    (record,) = site.world.ended
    assert record.recomputes == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["recomputed", ["x", "recomputed"]])
@served(connector="mooncake-ascend")
async def test_a_clients_stop_word_of_that_name_is_no_hand_back(
    site: Site, stop: object, *, stream: bool
) -> None:
    """One such request made 33 prefills and 33 decodes, then 502."""
    site.fleet.faults.set("decode", recomputed_after_tokens=5)
    exchange = await site.post(COMPLETIONS, BODY | {"stop": stop, "stream": stream})
    assert exchange.status == 200
    (record,) = site.world.ended
    assert (record.recomputes, record.outcome) == (0, Outcome.OK)
    assert len(site.received("prefill")) == len(site.received("decode")) == 1


@served(connector="mooncake-ascend")
async def test_a_whole_answer_that_is_handed_back_begins_again(site: Site) -> None:
    right = await alone(site, COMPLETIONS, BODY)
    site.fleet.faults.set("decode", recomputed_after_tokens=5)
    exchange = site.send(COMPLETIONS, BODY, headers=ID)
    await site.until(lambda: len(site.received("decode")) == 1)
    site.fleet.faults.clear()
    same(await exchange.end(), right)
    assert [seen.values["max_tokens"] for seen in site.received("decode")] == [20, 20]


@served(connector="mooncake-ascend", preemption=Preemption.STOP, rank_kv_tokens=300)
async def test_ranks_that_run_out_of_memory_hand_back_and_all_answers_are_right(site: Site) -> None:
    bodies = [BODY | USAGE | {"prompt": f"t{i} " * 20, "max_tokens": 60 + 5 * i} for i in range(8)]
    rights = [await alone(site, COMPLETIONS, one) for one in bodies]
    exchanges = [site.send(COMPLETIONS, one, headers=ID) for one in bodies]
    for exchange, right in zip(exchanges, rights, strict=True):
        await exchange.end()
        assert exchange.done, exchange.body
        assert exchange.text == right.text
        assert usage(exchange) == usage(right)
    assert sum(record.recomputes for record in site.world.ended) > 0


@pytest.mark.parametrize("fault", ["status_400", "status_429", "status_500"])
@pytest.mark.parametrize("engine", ["prefill", "decode"])
@served(connector="mooncake-ascend")
async def test_a_request_that_cannot_go_on_ends_truthfully(
    site: Site, engine: str, fault: str
) -> None:
    site.fleet.faults.set("decode", recomputed_after_tokens=4)
    exchange = site.send(COMPLETIONS, BODY | {"stream": True}, headers=ID)
    await site.until(lambda: len(site.received("decode")) == 1)
    site.fleet.faults.clear()
    site.fleet.faults.set(engine, **{fault: 1.0})
    await exchange.end()
    assert exchange.status == 200
    assert exchange.error is not None
    *said, last = exchange.chunks
    assert len(said) == 4
    assert last["error"]["code"] == 502
    (record,) = site.world.ended
    assert (record.outcome, record.output_tokens) == (Outcome.UPSTREAM_ERROR, 4)


@served(connector="mooncake-ascend")
async def test_what_text_cannot_carry_ends_truthfully(site: Site) -> None:
    site.fleet.faults.set("decode", recomputed_after_tokens=4)
    values = BODY | {"prompt": [5, 6, 7], "stream": True}
    exchange = await site.post(COMPLETIONS, values, ID)
    assert exchange.status == 200
    assert exchange.error is not None
    assert len(exchange.events) == 5
    error = exchange.chunks[-1]["error"]
    assert error["code"] == 502
    assert "token ids" in error["message"]


@served(connector="nixl")
async def test_a_stop_reason_of_that_name_means_nothing_to_nixl(site: Site) -> None:
    site.fleet.faults.set("decode", recomputed_after_tokens=4)
    exchange = await site.post(COMPLETIONS, BODY | {"stream": True}, ID)
    assert exchange.done
    assert len(site.received("decode")) == 1


# Decode first.


def hand_offs(site: Site) -> list[Any]:
    """Return the parameters of the prefills that decode ranks called for."""
    return [seen.values["kv_transfer_params"] for seen in site.received("prefill")]


@served(connector="mooncake-layerwise")
async def test_the_decode_leg_goes_first_and_its_rank_calls_back(site: Site) -> None:
    same(
        await site.post(COMPLETIONS, BODY | USAGE, ID),
        await alone(site, COMPLETIONS, BODY | USAGE),
    )
    decode, prefill = site.seen
    assert (decode.engine[:6], prefill.engine[:7]) == ("decode", "prefill")
    params = decode.values["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    own = f"http://127.0.0.1:{site.world.port}/v1/metaserver/"
    assert params["metaserver"].startswith(own)
    assert len(params["metaserver"]) == len(own) + 32
    told = prefill.values["kv_transfer_params"]
    assert told["do_remote_decode"] is True
    assert told["remote_engine_id"] == site.fleet.engine(decode.engine).engine_id
    assert prefill.values["max_tokens"] == 1
    assert prefill.header(b"x-request-id") == decode.header(b"x-request-id") == b"mine"
    (record,) = site.world.ended
    assert record.prefiller == site.fleet.engine(prefill.engine).url
    assert record.prefilled_ns is not None
    assert record.arrived_ns < record.prefilled_ns < record.ended_ns
    assert record.rank == site.fleet.engine(decode.engine).url
    assert record.prompt_tokens == usage(await site.post(COMPLETIONS, BODY, ID))[0]


def test_a_callback_needs_no_key_and_no_client_can_guess_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret\n")
    path.chmod(0o600)
    key: Headers = [(b"authorization", b"Bearer secret")]

    async def scenario(site: Site) -> None:
        exchange = site.send(COMPLETIONS, BODY | {"stream": True}, headers=key)
        await site.until(lambda: len(site.received("decode")) == 1)
        for guess in ("guess", "0" * 32, "", "../", "%2e"):
            answer = await site.post(f"/v1/metaserver/{guess}", {"remote_engine_id": "x"})
            assert answer.status == 404, guess
        assert (await exchange.end()).done
        url = site.received("decode")[0].values["kv_transfer_params"]["metaserver"]
        used = "/" + url.split("/", 3)[3]
        # It was good for one leg.
        assert (await site.post(used, {"remote_engine_id": "x"})).status == 404
        assert len(site.received("prefill")) == 1
        for seen in site.seen:
            assert seen.header(b"authorization") is None

    play(scenario, connector="mooncake-layerwise", flags={"api_key_file": str(path)})


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b'{"a":' * 500 + b"1" + b"}" * 500])
@served(connector="mooncake-layerwise", prefill_base_ns=200_000_000)
async def test_a_callback_that_is_no_object_or_comes_twice_starts_no_prefill(
    site: Site, body: bytes
) -> None:
    exchange = site.send(COMPLETIONS, BODY | {"stream": True}, headers=ID)
    await site.until(lambda: len(site.received("prefill")) == 1)
    url = site.received("decode")[0].values["kv_transfer_params"]["metaserver"]
    path = "/" + url.split("/", 3)[3]
    assert (await site.post(path, body)).status == 400
    assert (await site.post(path, bytes((1 << 20) + 1))).status == 413
    assert (await site.post(path, hand_offs(site)[0])).status == 200
    assert (await exchange.end()).done
    assert len(site.received("prefill")) == 1


@pytest.mark.parametrize("fault", ["kill", "status_500", "status_503", "reset_before_headers"])
@served(connector="mooncake-layerwise")
async def test_another_prefiller_does_what_the_first_one_fails_to(site: Site, fault: str) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    if fault == "kill":
        site.fleet.kill("prefill/0")
    else:
        site.fleet.faults.set("prefill/0", **{fault: 1.0})
    for number in range(3):
        same(await site.post(COMPLETIONS, another(BODY | USAGE, number), ID), right)
    assert len(site.received("decode")) == 3
    assert len(site.received("prefill/1")) == 3
    assert {record.outcome for record in site.world.ended} == {Outcome.OK}


@served(connector="mooncake-layerwise", prefill_base_ns=200_000_000)
async def test_a_prefiller_that_dies_meanwhile_is_replaced(site: Site) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    exchange = site.send(COMPLETIONS, BODY | USAGE, headers=ID)
    await site.until(lambda: len(site.received("prefill")) == 1)
    site.fleet.kill(site.received("prefill")[0].engine)
    same(await exchange.end(), right)
    assert len({seen.engine for seen in site.received("prefill")}) == 2
    assert len(site.received("decode")) == 1


@served(connector="mooncake-layerwise")
async def test_when_no_prefiller_can_the_client_is_told(site: Site) -> None:
    site.fleet.faults.set("prefill", status_500=1.0)
    failed = await site.post(COMPLETIONS, BODY | {"stream": True}, ID)
    assert failed.status == 502
    assert "prefill" in failed.json["error"]["message"]
    assert len(site.received("prefill")) >= 3


@served(connector="mooncake-layerwise")
async def test_a_prefillers_refusal_of_the_request_is_the_clients(site: Site) -> None:
    values = BODY | {"prompt": 7, "stream": True}
    refused = await site.post(COMPLETIONS, values, ID)
    assert refused.status == 400
    assert "valid string" in refused.json["error"]["message"]


@pytest.mark.parametrize("phase", ["before", "within", "after"])
@pytest.mark.parametrize("stream", [True, False])
@served(connector="mooncake-layerwise", prefill_base_ns=200_000_000)
async def test_a_client_that_leaves_ends_both_legs(site: Site, phase: str, stream: bool) -> None:
    if phase == "before":
        # The rank takes its time before it calls back.
        site.fleet.faults.set("decode", delay_s=5.0)
    exchange = site.send(COMPLETIONS, BODY | {"stream": stream}, headers=ID)
    await site.until(lambda: len(site.received("decode")) == 1)
    if phase == "within":
        await site.until(lambda: len(site.received("prefill")) == 1)
    elif phase == "after":
        await site.until(lambda: sum(site.fleet.stats()["running"]) == 1)
    exchange.call.abort()
    await site.until(lambda: not site.world.proxy.deployment.driver.sessions, limit_s=0.1)
    await site.until(lambda: all(e.idle for e in site.fleet.engines), limit_s=0.1)
    await asyncio.sleep(10.0)
    assert len(site.received("prefill")) == (0 if phase == "before" else 1)
    (record,) = site.world.ended
    assert record.outcome is Outcome.CANCELLED
    assert all(one.status is Status.UP for one in site.world.proxy.deployment.instances.prefillers)


@served(connector="mooncake-layerwise", prefill_base_ns=200_000_000)
async def test_a_removed_prefiller_hands_its_work_to_another(site: Site) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    exchange = site.send(COMPLETIONS, BODY | USAGE, headers=ID)
    await site.until(lambda: len(site.received("prefill")) == 1)
    engine = site.received("prefill")[0].engine
    order = {"role": "prefill", "url": site.fleet.engine(engine).url}
    drained = await site.admin("/admin/instances/drain", order)
    row = next(one for one in drained.json["instances"] if one["url"] == order["url"])
    assert (row["in_flight"], row["drained"]) == (1, False)
    assert (await site.admin("/admin/instances/remove", order)).status == 409
    forced = await site.admin("/admin/instances/remove", order | {"force": True})
    assert forced.status == 200
    await site.until(lambda: site.fleet.engine(engine).idle, limit_s=0.1)
    same(await exchange.end(), right)
    assert len(site.received("prefill")) == 2
    assert len(site.received("decode")) == 1


@served(connector="mooncake-layerwise", flags={"batch": 1})
async def test_while_the_proxy_drains_ranks_still_call_back(site: Site) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    # One slot on each rank: the others are bound, and call back, long after the drain began.
    exchanges = [site.send(COMPLETIONS, BODY | USAGE, headers=ID) for _ in range(6)]
    await exchanges[0].until_events(1)
    drain = asyncio.create_task(site.world.proxy.drain())
    for exchange in exchanges:
        await exchange.end()
        assert exchange.done
        assert exchange.text == right.text
    await drain
    assert {record.retries for record in site.world.ended} == {0}


@served(connector="mooncake-layerwise")
async def test_a_call_is_answered_even_if_every_prefiller_is_crowded(site: Site) -> None:
    page = b"".join(
        b'vllm:%b{engine="0"} 1.0\n' % name
        for name in (b"kv_cache_usage_perc", b"num_requests_running", b"num_requests_waiting")
    )
    site.handlers[b"/metrics"] = lambda _, __, reply: reply.send(200, [], page)
    await asyncio.sleep(3.0)
    assert not any(one.open for one in site.world.proxy.deployment.instances.prefillers)
    same(
        await site.post(COMPLETIONS, BODY | USAGE, ID),
        await alone(site, COMPLETIONS, BODY | USAGE),
    )


@pytest.mark.parametrize("failures", [1, 3])
@served(
    connector="mooncake-layerwise",
    flags=lambda failures: {
        "first_token_timeout_s": 2.0,
        "prefill_timeout_s": 3.0,
        "quarantine_failures": failures,
        "health_interval_s": 60.0,
    },
)
async def test_a_prefiller_that_hangs_is_to_blame_and_not_asked_again(
    site: Site, failures: int
) -> None:
    right = await alone(site, COMPLETIONS, BODY | USAGE)
    site.fleet.faults.set("prefill/0", hang=True)
    same(await site.post(COMPLETIONS, BODY | USAGE, ID), right)
    assert [seen.engine for seen in site.received("prefill")] == ["prefill/0", "prefill/1"]
    instances = site.world.proxy.deployment.instances
    assert (instances.prefillers[0].status is Status.QUARANTINED) == (failures == 1)
    assert [one.status for one in instances.ranks] == [Status.UP, Status.UP]


# Several ranks behind one server.


@served(ranks=4, dp_mode=DpMode.HEADER)
async def test_ranks_behind_one_server_are_named_in_a_header(site: Site) -> None:
    theirs: Headers = [*ID, (b"x-data-parallel-rank", b"99")]
    exchanges = [
        site.send(COMPLETIONS, BODY | USAGE | {"prompt": f"t{i}"}, headers=theirs)
        for i in range(12)
    ]
    for exchange in exchanges:
        assert (await exchange.end()).done
    assert {seen.header(b"x-data-parallel-rank") for seen in site.received("prefill")} == {None}
    ranks = [seen.header(b"x-data-parallel-rank") for seen in site.received("decode")]
    assert sorted(ranks, key=str) == sorted([b"0", b"1", b"2", b"3"] * 3, key=str)
    sent = [
        [name for name, _ in seen.request.headers].count(b"x-data-parallel-rank")
        for seen in site.received("decode")
    ]
    assert sent == [1] * 12
    (server,) = {record.rank.partition("@")[0] for record in site.world.ended}
    assert server == site.fleet.engine("decode/0").url


@served(dp_mode=DpMode.PORTS)
async def test_ranks_with_addresses_of_their_own_get_no_such_header(site: Site) -> None:
    await site.post(COMPLETIONS, BODY, [*ID, (b"x-data-parallel-rank", b"1")])
    assert all(seen.header(b"x-data-parallel-rank") is None for seen in site.seen)


@served(ranks=4, dp_mode=DpMode.HEADER)
async def test_a_server_that_dies_takes_all_of_its_ranks_along(site: Site) -> None:
    site.fleet.kill("decode/0")
    await asyncio.sleep(5.0)
    state = await site.state()
    assert [rank["status"] for rank in state["ranks"]] == ["quarantined"] * 4
    refused = await site.post(COMPLETIONS, BODY, ID)
    assert refused.status == 503
    await site.fleet.restore("decode/0")
    await asyncio.sleep(10.0)
    assert (await site.post(COMPLETIONS, BODY, ID)).status == 200


@served(ranks=4, dp_mode=DpMode.HEADER)
async def test_a_body_says_nothing_of_ranks(site: Site) -> None:
    values = BODY | {"data_parallel_rank": 3}
    assert (await site.post(COMPLETIONS, values, ID)).status == 200
    assert all("data_parallel_rank" not in json.loads(s.request.body) for s in site.seen)
