"""The fleet as a whole: ranks behind one port, clients that leave, death and return, its control."""

import asyncio
import random
from typing import Any

import pytest
from tests.lab.emulate.lab import COMPLETIONS, Lab, emulated, play
from tests.support.played import in_real_time

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate import DpMode, EmulatedFleet, EmulationSettings
from balanceroute.proxy.wire.messages import WireFault

VALUES: dict[str, Any] = {"prompt": "t1 t2", "max_tokens": 50, "ignore_eos": True, "stream": True}


def test_each_rank_has_a_port_or_all_have_one() -> None:
    async def ports(lab: Lab) -> None:
        assert lab.fleet.prefill_urls == ["http://127.0.0.1:8000"]
        assert lab.fleet.decode_urls == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]

    async def header(lab: Lab) -> None:
        assert lab.fleet.decode_urls == [f"http://127.0.0.1:8001@{rank}" for rank in range(3)]

    play(ports)
    play(header, dp_mode=DpMode.HEADER, ranks=3)


@pytest.mark.parametrize(
    ("sent", "rank"), [("0", 0), ("1", 1), ("2", 2), ("x", 1), (None, 1)], ids=str
)
@emulated(dp_mode=DpMode.HEADER, ranks=3)
async def test_the_header_chooses_the_rank_and_nonsense_the_least_busy_one(
    lab: Lab, sent: str | None, rank: int
) -> None:
    busy = [lab.send("decode/0", COMPLETIONS, VALUES) for _ in range(1)]
    other = lab.send("decode/0", COMPLETIONS, VALUES, headers={"X-data-parallel-rank": "2"})
    await other.tokens(1)
    before = lab.fleet.stats()["running"]
    assert before == [1, 0, 1]
    headers = {} if sent is None else {"X-data-parallel-rank": sent}
    exchanged = lab.send("decode/0", COMPLETIONS, VALUES, headers=headers)
    await exchanged.tokens(1)
    after = lab.fleet.stats()["running"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(i == rank) for i in range(3)]
    page = (await lab.get("decode/0", "/metrics")).body.decode()
    for number, running in enumerate(after):
        labels = f'{{engine="{number}",model_name="tiny"}}'
        assert f"vllm:num_requests_running{labels} {running}.0\n" in page
    for one in (*busy, other, exchanged):
        await one.end()


@emulated()
async def test_a_client_that_leaves_frees_its_slot_at_once(lab: Lab) -> None:
    for values in (VALUES, VALUES | {"n": 2}, VALUES | {"stream": False}):
        exchanged = lab.send("decode/0", COMPLETIONS, values)
        await asyncio.sleep(0.2)
        assert lab.fleet.stats()["running"][0] == values.get("n", 1)
        exchanged.call.abort()
        await asyncio.sleep(0.001)
        assert lab.fleet.stats()["running"] == [0, 0]
        assert lab.fleet.stats()["loads"] == [0, 0]
        assert lab.fleet.idle
    page = (await lab.get("decode/0", "/metrics")).body.decode()
    line = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 4.0'
    assert line in page


@emulated(batch_limit=1)
async def test_a_client_that_leaves_a_queue_is_never_served(lab: Lab) -> None:
    first, second, third = (lab.send("decode/0", COMPLETIONS, VALUES) for _ in range(3))
    await first.tokens(1)
    assert lab.fleet.stats()["waiting"] == [2, 0]
    second.call.abort()
    await asyncio.sleep(0.001)
    assert lab.fleet.stats()["waiting"] == [1, 0]
    await third.end()
    assert not second.events


@emulated(rank_kv_tokens=300, prefiller_kv_tokens=400)
async def test_random_traffic_with_clients_that_leave_leaves_nothing_behind(lab: Lab) -> None:
    rng = random.Random(11)

    async def client() -> None:
        values = VALUES | {
            "prompt": "t " * rng.randrange(1, 90),
            "max_tokens": rng.randrange(1, 40),
            "n": rng.choice((1, 1, 2)),
            "stream": rng.random() < 0.7,
        }
        patience_s = rng.choice((0.02, 0.1, 0.5, 60.0))
        rank = f"decode/{rng.randrange(2)}"
        try:
            async with asyncio.timeout(patience_s):
                if rng.random() < 0.8:
                    values = await lab.prefilled(COMPLETIONS, values)
        except TimeoutError:
            return
        exchanged = lab.send(rank, COMPLETIONS, values)
        try:
            async with asyncio.timeout(patience_s):
                await exchanged.end()
        except TimeoutError:
            exchanged.call.abort()

    clients = []
    for _ in range(120):
        clients.append(asyncio.ensure_future(client()))
        await asyncio.sleep(rng.random() * 0.05)
    await asyncio.gather(*clients)
    await asyncio.sleep(40.0)
    assert lab.fleet.idle
    stats = lab.fleet.stats()
    assert stats["held_blocks"] == [0]
    assert stats["leases"]["held"] == 0
    assert stats["leases"]["pulled"] > 20


@emulated()
async def test_a_killed_engine_resets_its_clients_and_refuses_until_it_is_restored(
    lab: Lab,
) -> None:
    exchanged = lab.send("decode/0", COMPLETIONS, VALUES)
    await exchanged.tokens(3)
    before = lab.fleet.engine("decode/0").engine_id
    lab.fleet.kill("decode/0")
    await exchanged.end()
    assert exchanged.error is not None
    assert exchanged.error.kind is WireFault.RESET
    assert lab.fleet.idle
    assert lab.fleet.stats()["loads"] == [0, 0]
    refused = await lab.get("decode/0", "/health")
    assert refused.error is not None
    await lab.fleet.restore("decode/0")
    await lab.fleet.restore("decode/0")  # It runs: nothing happens.
    answer = await lab.post("decode/0", COMPLETIONS, VALUES | {"max_tokens": 2})
    assert answer.done
    assert lab.fleet.engine("decode/0").engine_id != before
    with pytest.raises(ConfigError, match="engine 'decode/7' is unknown; known: prefill/0"):
        lab.fleet.kill("decode/7")


@emulated()
async def test_the_control_endpoints_do_what_the_methods_do(lab: Lab) -> None:
    await lab.post("decode/0", COMPLETIONS, VALUES)
    stats = (await lab.get("prefill/0", "/emulation/stats")).json
    assert stats["output_tokens"] == 50
    assert (await lab.post("decode/1", "/emulation/stats/reset", {})).json == {}
    assert (await lab.get("prefill/0", "/emulation/stats")).json["steps"] == 0
    assert (await lab.get("prefill/0", "/emulation/stats/picture")).json == []

    faults = {"engine": "decode", "status_500": 1.0, "malformed": "crlf"}
    answer = await lab.post("prefill/0", "/emulation/faults", faults)
    assert answer.json == {"engines": ["decode/0", "decode/1"]}
    active = (await lab.get("prefill/0", "/emulation/faults")).json
    assert (active["decode/1"]["status_500"], active["decode/1"]["malformed"]) == (1.0, "crlf")
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 500
    await lab.post("prefill/0", "/emulation/faults/clear", {"engine": "decode/0"})
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200

    killed = await lab.post("decode/0", "/emulation/kill", {"engine": "decode/0"})
    assert killed.json == {"engines": ["decode/0"]}
    await asyncio.sleep(0.01)
    assert (await lab.get("decode/0", "/health")).error is not None
    await lab.post("prefill/0", "/emulation/restore", {"engine": 1})
    await asyncio.sleep(0.01)
    assert (await lab.get("decode/0", "/health")).status == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/emulation/faults", b"{", "the body is not JSON"),
        ("/emulation/faults", b"[]", "the body is not a JSON object"),
        (
            "/emulation/faults",
            b'{"engine": "decode/9", "hang": true}',
            "engine 'decode/9' is unknown",
        ),
        ("/emulation/faults", b'{"hang": 3}', "hang: Expected `bool`"),
        ("/emulation/kill", b"{}", "engine None is unknown"),
        ("/emulation/dance", b"{}", "POST /emulation/dance is unknown"),
    ],
    ids=str,
)
@emulated()
async def test_a_control_request_that_makes_no_sense_is_a_400(
    lab: Lab, path: str, body: bytes, words: str
) -> None:
    answer = await lab.post("decode/0", path, body)
    assert answer.status == 400
    assert answer.json["error"].startswith(words)


@emulated()
async def test_small_routes_answer(lab: Lab) -> None:
    for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/health")):
        pong = lab.send("prefill/0", path, b"", method=method)
        await pong.end()
        assert (pong.status, pong.body) == (200, b"")
    text = {"prompt": "t5 hello t9", "return_token_strs": True}
    tokenized = (await lab.post("decode/0", "/tokenize", text)).json
    assert (tokenized["count"], tokenized["token_strs"]) == (3, ["t5", "hello", "t9"])
    back = await lab.post("prefill/0", "/detokenize", {"tokens": tokenized["tokens"]})
    assert back.json == {"prompt": "t5 hello t9"}
    vectors = (await lab.post("decode/0", "/v1/embeddings", {"input": ["a b", "c"]})).json
    again = (await lab.post("decode/1", "/v1/embeddings", {"input": "c"})).json
    assert [one["index"] for one in vectors["data"]] == [0, 1]
    assert vectors["data"][1]["embedding"] == again["data"][0]["embedding"]
    assert vectors["usage"]["prompt_tokens"] == 3
    lists = (
        await lab.post("decode/0", "/v1/embeddings", {"input": [[1, 2], [(1 << 63) - 1]]})
    ).json
    assert (len(lists["data"]), lists["usage"]["prompt_tokens"]) == (2, 3)
    for path, body in (
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": "t5"}),
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": [{"type": "message"}]}),
        ("/v1/embeddings", {"input": [1, "a"]}),
        ("/v1/embeddings", {"input": [[1], ["a"]]}),
        ("/v1/embeddings", {"input": [-1]}),
        ("/v1/embeddings", {"input": [1 << 63]}),
    ):
        assert (await lab.post("decode/0", path, body)).status == 400
    for model, status in (("nope", 404), (0, 400), (["tiny"], 400)):
        assert (await lab.post("decode/0", "/tokenize", {"model": model})).status == status


@emulated()
async def test_ids_come_from_the_header_the_body_or_the_generator(lab: Lab) -> None:
    values = {"prompt": "a", "max_tokens": 1}
    named = await lab.post("decode/0", COMPLETIONS, values, {"X-Request-Id": "abc"})
    assert named.json["id"] == "cmpl-abc"
    in_body = await lab.post("decode/0", COMPLETIONS, values | {"request_id": "def"})
    assert in_body.json["id"] == "cmpl-def"
    ids = {(await lab.post("decode/0", COMPLETIONS, values)).json["id"] for _ in range(5)}
    assert len(ids) == 5
    assert all(len(one) == len("cmpl-") + 16 for one in ids)


@emulated(prompt_tokens_details=True)
async def test_usage_tells_cached_tokens_if_asked_to(lab: Lab) -> None:
    values = {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True}
    apart = await lab.post("decode/0", COMPLETIONS, await lab.prefilled(COMPLETIONS, values))
    assert apart.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    alone = await lab.post("decode/0", COMPLETIONS, values)
    assert alone.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_limit": 0}, "batch_limit is 0, must be from 1"),
        ({"step_base_ns": 0}, "step_base_ns is 0, must be from 1"),
        ({"lease_s": 0.0}, "lease_s is 0.0, must be from"),
        ({"time_scale": float("nan")}, "time_scale is nan, must be from"),
        ({"rank_kv_tokens": 0}, "rank_kv_tokens is 0, must be from 1"),
        ({"model": ""}, "model is empty"),
        ({"prefillers": 0, "ranks": 0}, "ranks is 0, and there is no prefiller"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_served_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EmulationSettings(**changes)
    assert str(caught.value).startswith(words)


@in_real_time()
async def test_a_fleet_on_real_sockets_serves_and_closes() -> None:
    settings = EmulationSettings(prefillers=1, ranks=2, time_scale=1000.0)
    fleet = EmulatedFleet(settings, rng=random.Random(0))
    await fleet.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.engine("decode/1").port)
    body = b'{"prompt": "a b", "max_tokens": 3, "ignore_eos": true, "stream": true}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = await reader.read()
    assert answer.count(b"data: {") == 3
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert fleet.idle
    await fleet.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", fleet.engine("decode/1").port)


@in_real_time()
async def test_a_port_that_is_taken_starts_nothing() -> None:
    first = EmulatedFleet(EmulationSettings(prefillers=0, ranks=1), rng=random.Random(0))
    await first.start()
    port = first.engine(0).port
    second = EmulatedFleet(EmulationSettings(prefillers=0, ranks=1), rng=random.Random(0))
    with pytest.raises(OSError, match="in use"):
        await second.start("127.0.0.1", port)
    await first.close()
