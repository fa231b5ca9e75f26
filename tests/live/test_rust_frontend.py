"""Before engines with vLLM's Rust frontend: every byte is as without the proxy, whatever it asks of them."""

import re
from typing import Any

import pytest
from tests.support.site import Exchanged, Site, play, served

from balanceroute.proxy.lab.emulate import Frontend
from balanceroute.proxy.live.telemetry.record import Outcome

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
ASKED: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "t1 t2"}], "max_tokens": 9},
    COMPLETIONS: {"prompt": "t1 t2", "max_tokens": 9},
    GENERATE: {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 9, "temperature": 0, "ignore_eos": True},
    },
}
OPTIONS: list[dict[str, object]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"logprobs": 1},
    {"stream": False},
]
FLAGS: list[dict[str, object]] = [{}, {"resume": "exact"}, {"count_tokens": "events"}]
_VARIES = re.compile(rb'"(?:id|request_id)":"[^"]*"|"created":\d+|"system_fingerprint":"[^"]*"')


def plain(answer: Exchanged) -> tuple[int, bytes]:
    """Return what must not differ between two engines; of KV parameters a client has none."""
    return answer.status, _VARIES.sub(b"", answer.body)


def values_of(path: str, **more: Any) -> dict[str, Any]:
    values = {"model": "tiny", "stream": True, "temperature": 0, "ignore_eos": True}
    values |= ASKED[path] | more
    if path == GENERATE:
        del values["temperature"], values["ignore_eos"]
    if path == CHAT and "logprobs" in values:
        values["logprobs"] = True
    return values


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("path", ASKED)
@served("flags", frontend=Frontend.RUST)
async def test_every_byte_is_the_engines(site: Site, path: str, flags: dict[str, object]) -> None:
    for options in OPTIONS:
        values = values_of(path, **options)
        direct = await site.ask("decode/0", path, values)
        proxied = await site.post(path, values)
        assert plain(proxied) == plain(direct), options
        record = site.world.ended[-1]
        assert (record.outcome, record.retries) == (Outcome.OK, 0)
        if path != GENERATE or values["stream"]:  # Nobody tells its tokens.
            assert record.output_tokens == 9


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@served(flags={"resume": "exact"}, frontend=Frontend.RUST)
async def test_a_stream_that_goes_on_elsewhere_is_the_engines(
    site: Site, path: str, options: dict[str, object]
) -> None:
    values = values_of(path, **options)
    direct = await site.ask("decode/0", path, values)
    for engine in ("decode/0", "decode/1"):
        site.fleet.engine(engine).faults = site.fleet.engine(engine).faults.changed(
            {"reset_after_tokens": 4}
        )
    exchange = site.send(path, values)
    await exchange.until_events(4)
    for engine in ("decode/0", "decode/1"):
        site.fleet.engine(engine).faults = site.fleet.engine(engine).faults.changed(
            {"reset_after_tokens": None}
        )
    proxied = await exchange.end()
    assert plain(proxied) == plain(direct)
    assert site.world.ended[-1].resumes == 1


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [True, False])
def test_its_refusals_cost_nothing_and_blame_nobody(path: str, *, stream: bool) -> None:
    bad: dict[str, Any] = {}
    if path == GENERATE:
        bad["sampling_params"] = {"max_tokens": 4, "min_tokens": 9}
    bad |= {"min_tokens": 99}

    async def scenario(site: Site) -> None:
        values = values_of(path, stream=stream, **bad)
        direct = await site.ask("decode/0", path, values)
        proxied = await site.post(path, values)
        assert direct.status == 400
        assert direct.json["error"]["code"] == "invalid_request_error"
        assert plain(proxied) == plain(direct)
        assert len(site.received("prefill", path)) <= 1
        record = site.world.ended[-1]
        assert (record.outcome, record.retries) == (Outcome.CLIENT_ERROR, 0)

    play(scenario, frontend=Frontend.RUST)
