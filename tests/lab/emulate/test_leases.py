"""KV caches between engines: leases and how they end, and each connector's way to fail."""

import asyncio
import json
from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, COMPLETIONS, LONG_S, Lab, emulated

from balanceroute.proxy.lab.emulate.leases import LeaseEnd
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, WireFault

ERROR = b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'
ERROR_EVENTS = [
    b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", '
    b'"param": null, "code": 500}}\n\n',
    b"data: [DONE]\n\n",
]
VALUES: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 5,
    "ignore_eos": True,
}


@emulated()
async def test_a_prefill_takes_its_service_time_and_the_next_waits_for_it(lab: Lab) -> None:
    begin_s = lab.loop.time()
    bodies = [VALUES | {"prompt": "t " * count} for count in (100, 300)]
    ends_s: list[float] = []

    async def prefill(body: dict[str, Any]) -> None:
        await lab.prefill(COMPLETIONS, body)
        ends_s.append(lab.loop.time() - begin_s)

    await asyncio.gather(*(prefill(body) for body in bodies))
    # c + d x prompt, one after the other.
    assert ends_s == pytest.approx([0.025, 0.025 + 0.035], abs=1e-3)


@emulated()
async def test_a_lease_holds_its_blocks_until_it_is_pulled(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES | {"prompt": "t " * 65})
    assert lab.fleet.stats()["held_blocks"] == [3]
    assert lab.leases() == {"held": 1}
    exchanged = lab.send("decode/0", COMPLETIONS, leg | {"stream": True})
    await asyncio.sleep(0.001)
    assert lab.fleet.stats()["arriving"] == [1, 0]
    assert lab.fleet.stats()["held_blocks"] == [3]  # The transfer takes 2 ms.
    await exchanged.tokens(1)
    assert lab.fleet.stats()["held_blocks"] == [0]
    assert lab.leases() == {"pulled": 1}
    await exchanged.end()


@emulated(lease_s=30.0, time_scale=10.0)
async def test_a_lease_that_nobody_pulls_expires(lab: Lab) -> None:
    await lab.prefilled(COMPLETIONS, VALUES)
    await asyncio.sleep(2.9)
    assert lab.leases() == {"held": 1}
    await asyncio.sleep(0.2)
    assert lab.leases() == {"expired": 1}
    assert lab.fleet.idle


@emulated(lease_s=2.0, transfer_base_ns=5_000_000_000)
async def test_a_lease_does_not_expire_while_it_is_being_pulled(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    answer = await lab.post("decode/0", COMPLETIONS, leg)
    assert answer.status == 200
    assert lab.leases() == {"pulled": 1}
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(3.0)
    assert lab.leases() == {"pulled": 1, "held": 1}
    lab.fleet.kill("decode/0")  # No rank renews it now.
    assert lab.leases() == {"pulled": 1, "expired": 1}
    await asyncio.sleep(1.0)


@emulated()
async def test_a_pull_that_is_given_up_releases_the_lease(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    exchanged = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(0.001)
    exchanged.call.abort()
    await asyncio.sleep(0.001)
    assert lab.leases() == {"released": 1}
    assert lab.fleet.idle


@emulated()
async def test_a_pull_by_a_decoder_that_dies_is_taken_back(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    exchanged = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(0.001)
    lab.fleet.kill("decode/0")
    await exchanged.end()
    assert exchanged.error is not None
    assert lab.leases() == {"held": 1}
    second = await lab.post("decode/1", COMPLETIONS, leg)
    assert second.status == 200
    assert lab.leases() == {"pulled": 1}


@emulated()
async def test_a_lease_of_a_prefiller_that_died_is_lost(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    lab.fleet.kill("prefill/0")
    assert lab.leases() == {"lost": 1}
    for _ in range(2):  # Also after it came back: it is another engine then.
        answer = await lab.post("decode/0", COMPLETIONS, leg)
        assert (answer.status, answer.body) == (500, ERROR)
        await lab.fleet.restore("prefill/0")


@emulated()
async def test_a_prefiller_that_dies_during_a_pull_fails_it(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    exchanged = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(0.001)
    lab.fleet.kill("prefill/0")
    await exchanged.end()
    assert exchanged.status == 500
    assert lab.fleet.idle


@emulated()
async def test_n_choices_of_a_prefill_strand_all_leases_but_one(lab: Lab) -> None:
    answer = await lab.post(
        "prefill/0",
        COMPLETIONS,
        VALUES | {"n": 3, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
    )
    assert lab.leases() == {"held": 3}
    leg = VALUES | {"kv_transfer_params": answer.json["kv_transfer_params"]}
    assert (await lab.post("decode/0", COMPLETIONS, leg)).status == 200
    await asyncio.sleep(31.0)
    assert lab.leases() == {"pulled": 1, "expired": 2}
    assert lab.fleet.idle


@emulated(prefiller_kv_tokens=128)
async def test_a_prefill_without_room_for_its_blocks_waits_for_a_lease_to_end(lab: Lab) -> None:
    wide = VALUES | {"prompt": "t " * 96}
    leg = await lab.prefilled(COMPLETIONS, wide)
    second = asyncio.ensure_future(lab.prefill(COMPLETIONS, wide))
    await asyncio.sleep(5.0)
    stats = lab.fleet.stats()
    assert (stats["prefill_running"], stats["prefill_waiting"]) == ([0], [1])
    page = (await lab.get("prefill/0", "/metrics")).body
    assert b'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.75' in page
    assert b'vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0' in page
    await lab.post("decode/0", COMPLETIONS, leg)
    assert (await second).status == 200


@emulated()
async def test_a_prefill_that_is_given_up_frees_its_blocks_and_its_turn(lab: Lab) -> None:
    begin_s = lab.loop.time()
    params = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    slow = lab.send("prefill/0", COMPLETIONS, VALUES | params | {"prompt": "t " * 900})
    queued = lab.send("prefill/0", COMPLETIONS, VALUES | params)
    last = lab.send("prefill/0", COMPLETIONS, VALUES | params)
    await asyncio.sleep(0.01)
    queued.call.abort()
    slow.call.abort()
    await last.end()
    assert lab.loop.time() - begin_s < 0.01 + 0.025
    assert lab.leases() == {"held": 1}
    assert lab.fleet.stats()["held_blocks"] == [1]


@emulated(block_tokens=3)
async def test_a_prompt_of_more_blocks_ends_the_decode_engine(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    other = lab.send("decode/0", COMPLETIONS, VALUES | {"max_tokens": 900, "stream": True})
    await other.tokens(1)
    answer = await lab.post(
        "decode/0", COMPLETIONS, leg | {"prompt": "t1 t2 t3 t4", "stream": True}
    )
    assert answer.body == (
        b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for '
        b'the root cause.", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
        b"data: [DONE]\n\n"
    )
    await other.end()
    assert other.error is not None
    refused = await lab.post("decode/0", COMPLETIONS, VALUES)
    assert refused.error is not None
    assert refused.error.kind is WireFault.CONNECT
    assert (await lab.post("decode/1", COMPLETIONS, VALUES)).status == 200
    await lab.fleet.restore("decode/0")
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200


@pytest.mark.parametrize(
    ("changes", "after_s"),
    [
        ({"remote_engine_id": "another"}, 0.0),
        ({"remote_port": 5999}, 5.4),
        ({"remote_host": "10.9.9.9"}, 5.4),
        ({"remote_host": None}, None),
        ({"remote_request_id": None}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
@emulated("connector")
async def test_wrong_parameters_of_a_pull_fail_or_hang(
    lab: Lab, connector: str, changes: dict[str, Any], after_s: float | None
) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    leg["kv_transfer_params"] |= changes
    begin_s = lab.loop.time()
    exchanged = lab.send("decode/0", COMPLETIONS, leg | {"stream": True})
    if after_s is None:
        await asyncio.sleep(LONG_S)
        assert (exchanged.status, exchanged.body) == (200, b"")
        exchanged.call.abort()
    else:
        await exchanged.end()
        assert exchanged.events == ERROR_EVENTS
        assert lab.loop.time() - begin_s == pytest.approx(after_s, abs=0.01)
    await asyncio.sleep(LONG_S)
    assert lab.fleet.idle


@emulated(connector="mooncake-ascend")
async def test_an_ascend_prefill_has_its_keys_and_only_if_it_met_its_limit(lab: Lab) -> None:
    answer = await lab.prefill(COMPLETIONS, VALUES | {"return_token_ids": True})
    params = answer.json["kv_transfer_params"]
    assert list(params) == [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_pcp_size",
        "remote_dcp_size",
        "remote_ptp_size",
        "last_token_id",
        "remote_multi_nodes_meta_mapping",
        "num_prompt_blocks",
        "remote_block_size",
    ]
    assert [params["last_token_id"]] == answer.json["choices"][0]["token_ids"]
    first = answer.json["choices"][0]["text"].strip()
    stopped = await lab.prefill(COMPLETIONS, VALUES | {"stop": first, "min_tokens": 0})
    assert stopped.json["kv_transfer_params"] is not None  # min_tokens forbids the stop.


@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
@emulated("connector")
async def test_a_prefill_that_stops_leaves_nothing_to_pull(lab: Lab, connector: str) -> None:
    values = VALUES | {"temperature": 0}
    first = (await lab.post("decode/0", COMPLETIONS, values)).text.split()[0]
    answer = await lab.post(
        "prefill/0",
        COMPLETIONS,
        values | {"max_tokens": 1, "stop": first, "kv_transfer_params": {"do_remote_decode": True}},
    )
    assert answer.reasons() == ("stop", first)
    assert answer.json["kv_transfer_params"] is None
    assert lab.fleet.idle


async def mooncake_params(lab: Lab, transfer: str) -> dict[str, Any]:
    (url,) = lab.fleet.bootstrap_urls
    known = (await lab.get_url(f"{url}/query")).json
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": url,
        "remote_engine_id": known["0"]["engine_id"],
        "transfer_id": transfer,
    }


@emulated(connector="mooncake")
async def test_a_mooncake_decode_may_come_before_its_prefill(lab: Lab) -> None:
    alone = await lab.post("decode/0", COMPLETIONS, VALUES)
    params = await mooncake_params(lab, "xfer-1")
    early = lab.send("decode/1", COMPLETIONS, VALUES | {"kv_transfer_params": params})
    await asyncio.sleep(1.0)
    assert not early.status
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
    await lab.prefill(COMPLETIONS, VALUES, params=to_prefill)
    await early.end()
    assert early.text == alone.text
    assert lab.leases() == {"pulled": 1}


@pytest.mark.parametrize(
    ("changes", "hangs"),
    [
        ({"transfer_id": "xfer-nope"}, True),
        ({"transfer_id": None}, True),
        ({"remote_bootstrap_addr": "http://127.0.0.1:1"}, True),
        ({"remote_engine_id": "bad"}, False),
    ],
    ids=str,
)
@emulated(connector="mooncake")
async def test_wrong_mooncake_parameters_hang_except_for_the_engine_id(
    lab: Lab, changes: dict[str, Any], hangs: bool
) -> None:
    params = await mooncake_params(lab, "xfer-1")
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
    await lab.prefill(COMPLETIONS, VALUES, params=to_prefill)
    leg = VALUES | {"stream": True, "kv_transfer_params": params | changes}
    exchanged = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(LONG_S)
    assert exchanged.over != hangs
    assert exchanged.events == ([] if hangs else ERROR_EVENTS)
    exchanged.call.abort()
    await asyncio.sleep(1.0)
    assert lab.fleet.idle


@emulated(connector="mooncake")
async def test_a_dead_mooncake_prefiller_leaves_the_decode_hanging(lab: Lab) -> None:
    params = await mooncake_params(lab, "xfer-1")
    lab.fleet.kill("prefill/0")
    exchanged = lab.send("decode/0", COMPLETIONS, VALUES | {"kv_transfer_params": params})
    await asyncio.sleep(LONG_S)
    assert not exchanged.status
    exchanged.call.abort()
    await asyncio.sleep(1.0)


@emulated()
async def test_prompt_logprobs_of_a_remote_prefill_are_an_engine_error(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    for changes in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        answer = await lab.post("decode/0", COMPLETIONS, leg | changes)
        assert (answer.status, answer.body) == (500, ERROR)
        alone = await lab.post("decode/0", COMPLETIONS, VALUES | changes)
        assert alone.status == 200
    listed = (await lab.post("decode/0", COMPLETIONS, VALUES | {"prompt_logprobs": 2})).json
    entries = listed["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    for word, entry in zip(("t2", "t3"), entries[1:], strict=True):
        assert word in {candidate["decoded_token"] for candidate in entry.values()}


class Metaserver:
    """What a proxy does for the layerwise connector: it prefills when a decode rank asks."""

    def __init__(self, lab: Lab, values: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._lab = lab
        self._values = values
        self._tasks: list[asyncio.Task[None]] = []

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        assert request.path == b"/v1/metaserver"
        self.asked.append(json.loads(request.body))
        self._tasks.append(asyncio.ensure_future(self._prefill(reply)))

    async def _prefill(self, reply: Reply) -> None:
        answer = await self._lab.prefill(COMPLETIONS, self._values, params=self.asked[-1])
        assert answer.json["kv_transfer_params"] is None
        reply.send(200, [], b"{}")


@emulated(connector="mooncake-layerwise")
async def test_a_layerwise_decode_asks_the_metaserver_for_its_prefill(lab: Lab) -> None:
    metaserver = Metaserver(lab, VALUES)
    server = Server(metaserver)
    await server.start("127.0.0.1", 9999)
    alone = await lab.post("decode/0", COMPLETIONS, VALUES)
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": "http://127.0.0.1:9999/v1/metaserver",
    }
    apart = await lab.post(
        "decode/1", COMPLETIONS, VALUES | {"kv_transfer_params": params}, {"X-Request-Id": "r1"}
    )
    assert apart.text == alone.text
    (asked,) = metaserver.asked
    assert asked["request_id"] == "cmpl-r1-0"
    assert asked["do_remote_decode"] is True
    assert asked["remote_engine_id"] == lab.fleet.engine("decode/1").engine_id
    assert lab.leases() == {"pulled": 1}
    await asyncio.sleep(1.0)
    assert lab.fleet.idle
    server.close()


@emulated(connector="mooncake-layerwise")
async def test_a_layerwise_decode_goes_on_though_the_prefill_ended(lab: Lab) -> None:
    metaserver = Metaserver(lab, VALUES)
    server = Server(metaserver)
    await server.start("127.0.0.1", 9999)
    alone = await lab.post("decode/0", COMPLETIONS, VALUES)
    # The KV cache was pushed before this token was drawn.
    lab.fleet.faults.set("prefill", eos_first=1.0)
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": "http://127.0.0.1:9999/v1/metaserver",
    }
    apart = await lab.post("decode/1", COMPLETIONS, VALUES | {"kv_transfer_params": params})
    assert apart.text == alone.text
    assert len(metaserver.asked) == 1
    assert lab.leases() == {"pulled": 1}
    server.close()


@emulated(connector="mooncake-layerwise")
async def test_a_layerwise_prefill_for_a_decode_that_is_gone_keeps_nothing(lab: Lab) -> None:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": lab.fleet.engine("decode/0").engine_id,
        "request_id": "cmpl-gone-0",
    }
    answer = await lab.prefill(COMPLETIONS, VALUES, params=params)
    assert answer.status == 200
    assert lab.leases() == {"released": 1}
    assert lab.fleet.idle


# Blocks that are pulled although they are not the prompt's: the wrong text, and nothing says so.


OTHER = VALUES | {"prompt": "t7 t8 t9 t10"}
PULLING = ["nixl", "mooncake-ascend"]
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


async def texts(lab: Lab, *bodies: dict[str, Any]) -> list[str]:
    """Return the right answers."""
    return [(await lab.post("decode/0", COMPLETIONS, body)).text for body in bodies]


@STREAMED
@pytest.mark.parametrize("connector", PULLING)
@emulated("connector")
async def test_a_lease_pulled_twice_is_answered_with_the_text_of_another_prompt(
    lab: Lab, connector: str, streamed: bool
) -> None:
    right, others = await texts(lab, VALUES, OTHER)
    leg = await lab.prefilled(COMPLETIONS, VALUES) | {"stream": streamed}
    assert (await lab.post("decode/0", COMPLETIONS, leg)).text == right
    await lab.prefilled(COMPLETIONS, OTHER)  # Its blocks are those that were freed.
    again = await lab.post("decode/1", COMPLETIONS, leg, {"X-Request-Id": "again"})
    assert (again.status, again.text) == (200, others)
    assert [(one.request_id, one.end) for one in lab.fleet.misreads] == [
        ("cmpl-again", LeaseEnd.PULLED)
    ]
    assert lab.fleet.stats()["misreads"] == lab.fleet.stats()["misses"]["pulled"] == 1
    lab.fleet.reset_stats()
    assert lab.fleet.stats()["misreads"] == 0


@pytest.mark.parametrize("connector", PULLING)
@emulated("connector")
async def test_a_misread_is_never_right_by_chance(lab: Lab, connector: str) -> None:
    (right,) = await texts(lab, VALUES)
    for _ in range(3):  # The prefiller computes nothing but this prompt.
        leg = await lab.prefilled(COMPLETIONS, VALUES)
        await lab.post("decode/0", COMPLETIONS, leg)
        again = await lab.post("decode/0", COMPLETIONS, leg)
        assert again.status == 200
        assert again.text != right
        assert again.json["usage"]["prompt_tokens"] == 3  # Of the request's own prompt.


@emulated()
async def test_a_misread_tool_call_has_other_arguments(lab: Lab) -> None:
    call = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "t1"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "get",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "get"}},
        "max_tokens": 50,
    }
    leg = await lab.prefilled(CHAT, call)
    said = [
        (await lab.post("decode/0", CHAT, leg)).json["choices"][0]["message"]["tool_calls"]
        for _ in range(2)
    ]
    assert said[0][0]["function"]["name"] == said[1][0]["function"]["name"] == "get"
    assert said[0][0]["function"]["arguments"] != said[1][0]["function"]["arguments"]


@pytest.mark.parametrize("connector", PULLING)
@emulated("connector", lease_s=3.0)
async def test_an_expired_lease_is_misread(lab: Lab, connector: str) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    await asyncio.sleep(3.1)
    assert lab.leases() == {"expired": 1}
    late = await lab.post("decode/0", COMPLETIONS, leg | {"stream": True})
    assert late.status == 200
    assert late.text != right
    assert [one.end for one in lab.fleet.misreads] == [LeaseEnd.EXPIRED]


@emulated()
async def test_a_released_lease_is_misread(lab: Lab) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    given_up = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(0.001)
    given_up.call.abort()
    await asyncio.sleep(0.001)
    again = await lab.post("decode/1", COMPLETIONS, leg)
    assert (again.status, again.text == right) == (200, False)
    assert [one.end for one in lab.fleet.misreads] == [LeaseEnd.RELEASED]


@emulated()
async def test_a_second_pull_does_not_disturb_the_first(lab: Lab) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    both = [lab.send(f"decode/{rank}", COMPLETIONS, leg) for rank in (0, 1)]
    for exchanged in both:
        await exchanged.end()
    assert [exchanged.status for exchanged in both] == [200, 200]
    assert [exchanged.text == right for exchanged in both] == [True, False]
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.idle


@pytest.mark.parametrize("connector", PULLING)
@pytest.mark.parametrize(
    "changes", [{"remote_request_id": "another"}, {"remote_block_ids": [[1, 2]]}], ids=str
)
@emulated("connector")
async def test_blocks_of_nobody_in_particular_are_read_all_the_same(
    lab: Lab, connector: str, changes: dict[str, Any]
) -> None:
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    leg["kv_transfer_params"] |= changes
    answer = await lab.post("decode/0", COMPLETIONS, leg)
    assert (answer.status, answer.text == right) == (200, False)
    assert [one.end for one in lab.fleet.misreads] == [None]
    assert lab.leases() == {"held": 1}


@emulated()
async def test_the_cache_of_another_prompt_of_the_same_length_is_used(lab: Lab) -> None:
    mine = VALUES | {"prompt": "t9 t2 t3"}
    (right,) = await texts(lab, VALUES)
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    answer = await lab.post("decode/0", COMPLETIONS, leg | mine)
    assert (answer.status, answer.text) == (200, right)
    assert lab.fleet.stats()["misreads"] == 1


@pytest.mark.parametrize("connector", PULLING)
@emulated("connector")
async def test_a_prefiller_that_was_started_again_is_noticed(lab: Lab, connector: str) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    lab.fleet.kill("prefill/0")
    await lab.fleet.restore("prefill/0")
    assert (await lab.post("decode/0", COMPLETIONS, leg)).status == 500
    assert lab.fleet.misreads == []


@emulated(connector="mooncake")
async def test_mooncake_waits_for_what_was_pulled_already(lab: Lab) -> None:
    (url,) = lab.fleet.bootstrap_urls
    params = {
        "do_remote_prefill": True,
        "remote_bootstrap_addr": url,
        "remote_engine_id": (await lab.get_url(f"{url}/query")).json["0"]["engine_id"],
        "transfer_id": "xfer-1",
    }
    to_prefill = {"do_remote_decode": True, "transfer_id": "xfer-1"}
    await lab.prefill(COMPLETIONS, VALUES, params=to_prefill)
    leg = VALUES | {"kv_transfer_params": params}
    assert (await lab.post("decode/0", COMPLETIONS, leg)).status == 200
    again = lab.send("decode/1", COMPLETIONS, leg)
    await asyncio.sleep(600.0)
    assert not again.status
    again.call.abort()
    assert lab.fleet.misreads == []


# What befalls who continues an answer from ids with a KV cache that is another prompt's: vLLM says nothing.
#
# Each test is a client that walks into it. Figures are those seen with vLLM 0.32 and its NIXL connector.


BLOCK = 8
CACHES = {"block_tokens": BLOCK, "prefix_cache_tokens": 1_000}
ANSWER = 12


def body(ids: list[int], tokens: int = ANSWER) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": ids,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def prompt(tokens: int) -> list[int]:
    return list(range(100, 100 + tokens))


def ids_of(message: Any) -> list[int]:
    found: list[int] = message["choices"][0]["token_ids"]
    return found


async def said(lab: Lab, ids: list[int], engine: str = "decode/1") -> list[int]:
    """Return what one engine says, alone."""
    answer = await lab.post(engine, COMPLETIONS, body(ids))
    assert answer.status == 200, answer.body
    return ids_of(answer.json)


async def naive(lab: Lab, ids: list[int], more: list[int], **values: Any) -> Any:
    """Continue behind `ids` and `more` with the KV cache of `ids` alone."""
    leg = await lab.prefilled(COMPLETIONS, body(ids) | values)
    leg |= body(ids + more, ANSWER - len(more))
    return await lab.post("decode/0", COMPLETIONS, leg)


async def cache(lab: Lab, ids: list[int]) -> None:
    """Have the decode rank's prefix cache know `ids`."""
    await lab.post("decode/0", COMPLETIONS, body([*ids, 9], 1))


@pytest.mark.parametrize("tokens", [5, BLOCK - 1, BLOCK + 1, 2 * BLOCK - 1])
@pytest.mark.parametrize("cached", [0, 1])
@emulated(**CACHES)
async def test_one_id_more_is_right_within_a_block(lab: Lab, tokens: int, cached: int) -> None:
    right = await said(lab, prompt(tokens))
    await cache(lab, prompt(min(tokens, cached * BLOCK)))
    answer = await naive(lab, prompt(tokens), right[:1])
    assert ids_of(answer.json) == right[1:]
    assert not lab.fleet.misreads
    assert not lab.fleet.overruns


@emulated(**CACHES)
async def test_one_id_more_behind_full_blocks_kills_the_engine(lab: Lab) -> None:
    right = await said(lab, prompt(2 * BLOCK))
    answer = await naive(lab, prompt(2 * BLOCK), right[:1])
    assert answer.status == 500
    assert len(lab.fleet.overruns) == 1
    assert not lab.fleet.engine("decode/0").alive


@emulated(**CACHES)
async def test_one_id_more_is_right_behind_full_blocks_that_are_all_cached(lab: Lab) -> None:
    right = await said(lab, prompt(2 * BLOCK))
    await cache(lab, prompt(2 * BLOCK))
    answer = await naive(lab, prompt(2 * BLOCK), right[:1])
    assert ids_of(answer.json) == right[1:]
    assert lab.fleet.misreads == []


@pytest.mark.parametrize("cached", [1, 2])
@emulated(**CACHES)
async def test_one_id_more_behind_full_blocks_cached_in_part_poisons_the_cache(
    lab: Lab, cached: int
) -> None:
    ids = prompt(3 * BLOCK)
    right = await said(lab, ids)
    await cache(lab, ids[: cached * BLOCK])
    answer = await naive(lab, ids, right[:1])
    assert (answer.status, ids_of(answer.json) == right[1:]) == (200, False)
    # Nobody transfers anything now.
    later = [*ids, 9]
    assert await said(lab, later, "decode/0") != await said(lab, later)
    assert [one.again for one in lab.fleet.misreads] == [False, True]
    # What is computed anew is right.
    others = [7, *ids]
    assert await said(lab, others, "decode/0") == await said(lab, others)


@emulated(**CACHES | {"prefix_cache_tokens": 6 * BLOCK})
async def test_a_poisoned_block_is_gone_with_the_others(lab: Lab) -> None:
    ids = prompt(3 * BLOCK)
    right = await said(lab, ids)
    await cache(lab, ids[:BLOCK])
    await naive(lab, ids, right[:1])
    await cache(lab, list(range(500, 500 + 6 * BLOCK)))
    assert await said(lab, ids, "decode/0") == right


@pytest.mark.parametrize("more", [2, 3, 7])
@emulated(**CACHES)
async def test_old_parameters_with_more_ids_are_taken_and_wrong(lab: Lab, more: int) -> None:
    ids = prompt(BLOCK + 1)
    right = await said(lab, ids)
    answer = await naive(lab, ids, right[:more])
    assert (answer.status, ids_of(answer.json) == right[more:]) == (200, False)
    assert len(lab.fleet.misreads) == 1


@emulated(**CACHES)
async def test_fewer_ids_get_the_last_blocks(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, body(prompt(3 * BLOCK + 1)))
    fewer = prompt(2 * BLOCK + 1)
    answer = await lab.post("decode/0", COMPLETIONS, leg | body(fewer))
    assert (answer.status, ids_of(answer.json) == await said(lab, fewer)) == (200, False)


@pytest.mark.parametrize("tokens", [BLOCK - 1, BLOCK, 2 * BLOCK])
@emulated(**CACHES)
async def test_one_id_more_is_right_where_the_prefiller_has_computed_with_it(
    lab: Lab, tokens: int
) -> None:
    right = await said(lab, prompt(tokens))
    kv = {"do_remote_decode": True, "do_remote_prefill": False}
    two = await lab.post(
        "prefill/0", COMPLETIONS, body(prompt(tokens), 2) | {"kv_transfer_params": kv}
    )
    leg = body(prompt(tokens) + right[:1], ANSWER - 1)
    leg["kv_transfer_params"] = two.json["kv_transfer_params"]
    answer = await lab.post("decode/0", COMPLETIONS, leg)
    assert ids_of(answer.json) == right[1:]
    assert lab.fleet.misreads == []


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@emulated(partial_utf8=0.3)
async def test_a_prompt_that_ends_within_a_character_is_said_again(
    lab: Lab, streamed: bool
) -> None:
    first = body([4, 5, 6], 30)
    answer = (await lab.post("decode/0", COMPLETIONS, first)).json["choices"][0]
    ids, text = answer["token_ids"], answer["text"]
    halves = 0
    for cut in range(1, 30):
        rest = first | {"prompt": [4, 5, 6, *ids[:cut]], "max_tokens": 30 - cut}
        further = await lab.post("decode/0", COMPLETIONS, rest | {"stream": streamed})
        if text.endswith(further.text):
            continue
        halves += 1
        assert further.text.startswith("t4 t5 t6 ")
        assert further.text.endswith(text[-5:])
    assert 0 < halves < 29
