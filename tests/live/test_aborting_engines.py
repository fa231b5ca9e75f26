"""Engines that abort what they have, as vLLM does when it is told to stop, and when it is told to sleep."""

from typing import Any

import pytest
from tests.live.agents import ID, MESSAGES, PATHS, alone, body, failed_within, plain, same
from tests.live.control.test_pausing import reason
from tests.support.site import Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
}
IDS: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [1, 2, 3],
    "sampling_params": {"max_tokens": 60, "ignore_eos": True, "temperature": 0},
}
SAID = "the engine aborted the request"


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_prompt_whose_prefiller_is_told_to_stop_is_prefilled_elsewhere(
    site: Site, *, stream: bool
) -> None:
    """Its answer says 200 and has no text: the client had that for a whole answer."""
    values = TALK | {"stream": stream}
    right = await site.ask("decode/0", CHAT, values)
    site.fleet.faults.set("prefill/0", stopping=True)
    for number in range(1, 4):
        exchange = await site.post(CHAT, values)
        assert (exchange.status, exchange.text) == (200, right.text)
        assert (await site.ended(number))[-1].outcome is Outcome.OK
    assert sum(record.retries for record in site.world.ended) >= 1


@pytest.mark.parametrize(("path", "values"), [(CHAT, TALK), (GENERATE, IDS)])
@served()
async def test_a_whole_answer_is_decoded_elsewhere(
    site: Site, path: str, values: dict[str, Any]
) -> None:
    right = await site.ask("decode/1", path, values)
    exchange = site.send(path, values)
    await site.until(lambda: len(site.received("decode", path)) == 2)
    await site.until(lambda: bool(site.fleet.engine("decode/0").exchanges))
    site.fleet.faults.set("decode/0", stopping=True)
    await exchange.end()
    said, wanted = exchange.json["choices"], right.json["choices"]
    assert (exchange.status, said) == (200, wanted)
    (record,) = await site.ended()
    assert (record.outcome, record.retries, record.output_tokens) == (Outcome.OK, 1, 60)


@pytest.mark.parametrize("resume", ["off", "exact"])
@served(flags=lambda resume: {"resume": resume})
async def test_a_stream_that_has_begun_goes_on_elsewhere_or_says_that_it_does_not(
    site: Site, resume: str
) -> None:
    values = TALK | {"stream": True}
    right = await site.ask("decode/1", CHAT, values)
    exchange = await site.send(CHAT, values).until_events(9)
    site.fleet.faults.set("decode/0", stopping=True)
    await exchange.end()
    (record,) = await site.ended()
    if resume == "exact":
        assert (exchange.done, exchange.text, reason(exchange)) == (True, right.text, "length")
        assert (record.outcome, record.resumes) == (Outcome.OK, 1)
    else:
        assert right.text.startswith(exchange.text)
        assert SAID in exchange.chunks[-1]["error"]["message"]
        assert exchange.error is not None
        assert (record.outcome, record.status) == (Outcome.UPSTREAM_ERROR, 200)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("resume", ["off", "exact"])
@served(flags=lambda resume: {"resume": resume})
async def test_what_an_engine_closes_as_it_aborts_is_not_closed_for_the_client(
    site: Site, resume: str, path: str
) -> None:
    values = body(path, tokens=60, stream=True, temperature=0)
    right = await alone(site, path, values, "decode/1")
    exchange = await site.send(path, values, headers=ID).until_events(9)
    site.fleet.faults.set("decode/0", stopping=True)
    await exchange.end()
    (record,) = await site.ended()
    if path == MESSAGES and resume == "exact":
        same(exchange, right)
        assert (record.outcome, record.resumes) == (Outcome.OK, 1)
    elif path == MESSAGES:
        assert SAID in failed_within(exchange, path)
        assert plain(right.body).startswith(plain(b"".join(exchange.events[:-1])))
    else:  # It says that it has completed.
        assert record.outcome is Outcome.OK


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@served(flags=lambda first_token: {"first_token": first_token})
async def test_a_stream_of_which_nothing_new_has_come_is_repeated(
    site: Site, first_token: str
) -> None:
    values = TALK | {"stream": True}
    right = await site.ask("decode/1", CHAT, values)
    site.fleet.faults.set("decode/0", stopping=True)
    exchange = await site.post(CHAT, values)
    assert (exchange.done, exchange.text) == (True, right.text)
    (record,) = await site.ended()
    assert (record.outcome, record.retries) == (Outcome.OK, 1)


@served(flags={"direct": "prefill"})
async def test_an_engine_that_did_all_of_a_request_is_followed_by_another(site: Site) -> None:
    values = TALK | {"n": 2, "seed": 3, "temperature": 1}
    right = await site.ask("prefill/1", CHAT, values)
    exchange = site.send(CHAT, values)
    await site.until(lambda: any(site.fleet.engine(f"prefill/{i}").exchanges for i in (0, 1)))
    busy = next(i for i in (0, 1) if site.fleet.engine(f"prefill/{i}").exchanges)
    site.fleet.faults.set(f"prefill/{busy}", stopping=True)
    await exchange.end()
    assert (exchange.status, exchange.json["choices"]) == (200, right.json["choices"])


@served()
async def test_where_all_engines_abort_the_client_is_told(site: Site) -> None:
    site.fleet.faults.set("decode", stopping=True)
    exchange = await site.post(CHAT, TALK)
    assert (exchange.status, exchange.json["error"]["message"]) == (502, SAID)
    (record,) = await site.ended()
    assert record.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("resume", ["off", "exact"])
@served(flags=lambda resume: {"resume": resume})
async def test_what_is_aborted_by_order_ends_with_what_it_had(site: Site, resume: str) -> None:
    streams = [site.send(CHAT, TALK | {"stream": True, "max_tokens": 400}) for _ in range(3)]
    for stream in streams:
        await stream.until_events(9)
    whole = site.send(CHAT, TALK | {"max_tokens": 400})
    await site.until(lambda: len(site.received("decode", CHAT)) == 4)
    assert (await site.admin("/abort_requests", b"{}")).status == 200
    for answer in (*streams, whole):
        await answer.end()
        assert (answer.status, reason(answer), answer.error) == (200, "abort", None)
    assert {record.outcome for record in await site.ended(4)} == {Outcome.OK}
