"""Streams that no engine can continue, so that another one begins them again, without what the client has."""

import asyncio
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.test_proxy_connectors import (
    BODY,
    CHAT,
    COMPLETIONS,
    ID,
    TALK,
    USAGE,
    alone,
    another,
    same,
)
from tests.live.test_resumed_streams import EACH, EXACT, FAULTS, GREEDY, through_a_failure
from tests.live.test_token_requests import ASKED, GENERATE, SAMPLING
from tests.support.chaos.expectation import comparable
from tests.support.site import Site, play, served

from balanceroute.proxy.lab.emulate.faults import MalformedStream
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.topologies import CONNECTORS

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
STREAMS = {COMPLETIONS: BODY | GREEDY, CHAT: TALK | GREEDY}
WORDS = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": dict.fromkeys(("city", "day", "unit"), WORDS)
    | {"list": {"type": "array", "items": WORDS}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get_weather", "look_up")
]
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
IMAGE = [
    {"type": "text", "text": "t1 t2"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
]
LONG = {"max_tokens": 60}
# The path, and what is asked for.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": (CHAT, {"tools": TOOLS}),
    "required": (CHAT, LONG | {"tools": TOOLS, "tool_choice": "required"}),
    "named": (
        CHAT,
        LONG
        | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    ),
    "logprobs": (CHAT, {"tools": TOOLS, "logprobs": True, "top_logprobs": 2}),
    "schema": (CHAT, LONG | {"response_format": JSON_FORM}),
    "outputs": (COMPLETIONS, LONG | {"structured_outputs": {"json": SCHEMA}}),
    "penalty": (CHAT, {"frequency_penalty": 0.5}),
    "bad words": (COMPLETIONS, {"bad_words": ["t99999"]}),
    "image": (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}),
    "ids": (CHAT, {"return_token_ids": True}),
    "completion's ids": (COMPLETIONS, {"return_token_ids": True, "logprobs": 2}),
    "seed": (CHAT, {"temperature": 0.7, "seed": 3, "stop": ["never said"]}),
    "several": (COMPLETIONS, {"temperature": 0.7, "seed": 3, "n": 2}),
    "several chats": (CHAT, {"temperature": 0.7, "seed": 3, "n": 3}),
    "unknown": (CHAT, {"unheard_of": 1}),
    "text of ids": (GENERATE, {"output_mode": "text", "stream": True}),
    "schema of ids": (
        GENERATE,
        {"sampling_params": SAMPLING | LONG | {"structured_outputs": {"json": SCHEMA}}},
    ),
}
ASKED_OF = {**STREAMS, GENERATE: ASKED | {"stream": True}}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize("kind", KINDS)
@served(flags=EXACT | {"idle_stream_timeout_s": 2.0})
async def test_the_client_sees_one_unbroken_stream(
    site: Site, kind: str, fault: dict[str, int]
) -> None:
    path, more = KINDS[kind]
    values = ASKED_OF[path] | more
    await through_a_failure(site, path, values, **fault)
    (record,) = await site.ended()
    assert record.outcome is Outcome.OK
    assert (record.resumes, record.retries, record.recomputes) == (1, 0, 0)
    first, second = site.received("decode")
    assert first.engine != second.engine
    # It is asked for the same, and nothing more.
    keys = first.values.keys() - {"kv_transfer_params"}
    assert keys <= values.keys() | {"stream_options"}
    assert {key: second.values[key] for key in keys} == {key: first.values[key] for key in keys}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@served(flags=EXACT, step_base_ns=200_000_000)
async def test_a_long_repetition_is_not_silent(site: Site, path: str) -> None:
    """All that the client has takes as long as it did the first time."""
    values = TALK | GREEDY | LONG | {"stream": True, "frequency_penalty": 0.5}
    sign = b'event: ping\ndata: {"type": "ping"}\n\n' if path == MESSAGES else b": keep-alive\n\n"
    right = await alone(site, path, values)
    site.fleet.faults.set("decode/0", reset_after_tokens=50)
    both = [site.send(path, values, headers=ID) for _ in range(2)]  # One of them is there.
    lengths, since_s, silent_s = [0, 0], [site.loop.time()] * 2, 0.0
    while not all(one.over for one in both):
        await asyncio.sleep(0.1)
        for i, one in enumerate(both):
            if one.over or len(one.body) > lengths[i]:
                lengths[i], since_s[i] = len(one.body), site.loop.time()
            silent_s = max(silent_s, site.loop.time() - since_s[i])
    assert 4.0 <= silent_s < 5.0
    signs = [one.body.count(sign) for one in both]
    assert sorted(signs) == [0, 2]
    own = re.compile(rb'"(id|created|system_fingerprint)":("[^"]*"|\d+)')
    for one in both:
        told = one.body.replace(sign, b"")
        assert own.sub(b"", told) == own.sub(b"", right.body)


@pytest.mark.parametrize("connector", CONNECTORS)
@served("connector", flags=EXACT)
async def test_every_connector_prefills_it_again(site: Site, connector: str) -> None:
    path, more = KINDS["required"]
    await asyncio.sleep(1.0)
    await through_a_failure(site, path, STREAMS[path] | more, reset_after_tokens=7)
    (record,) = await site.ended()
    assert (record.outcome, record.resumes) == (Outcome.OK, 1)
    prompts = [json.dumps(leg.values["messages"]) for leg in site.received("prefill")]
    assert len(prompts) == 2
    assert len(set(prompts)) == 1


@pytest.mark.parametrize("more", [{}, USAGE, EACH], ids=["plain", "usage", "each"])
@pytest.mark.parametrize("odd", [{}, {"merged_outputs": 0.4}, {"partial_utf8": 0.4}], ids=str)
def test_reasoning_goes_on_in_its_midst(odd: dict[str, Any], more: dict[str, Any]) -> None:
    async def scenario(site: Site) -> None:
        values = STREAMS[CHAT] | more
        right = await alone(site, CHAT, values)
        assert b'"reasoning":"' in right.body
        for tokens in range(1, 20):
            site.fleet.faults.set("decode/0", reset_after_tokens=tokens)
            begun = len(site.world.ended)
            exchange = await site.send(CHAT, another(values, tokens), headers=ID).end()
            same(exchange, right)
            (record,) = (await site.ended(begun + 1))[begun:]
            assert (record.output_tokens, record.resumes) == (20, 1)

    flags = EXACT | {"quarantine_failures": 1_000}
    play(scenario, flags=flags, reasoning_parser=True, **odd)


@pytest.mark.parametrize("odd", [{}, {"merged_outputs": 0.4}], ids=str)
@pytest.mark.parametrize("kind", ["required", "schema", "logprobs", "ids", "several chats"])
@served("**odd", flags=EXACT | {"quarantine_failures": 1_000})
async def test_a_stream_may_break_behind_each_of_its_tokens(
    site: Site, kind: str, odd: dict[str, float]
) -> None:
    path, more = KINDS[kind]
    values = STREAMS[path] | more
    right = await alone(site, path, values)
    for tokens in range(20):
        site.fleet.faults.set("decode/0", reset_after_tokens=tokens)
        exchange = await site.send(path, another(values, tokens), headers=ID).end()
        same(exchange, right)


TALKING: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "max_tokens": 60,
    "temperature": 0,
    "stream": True,
}
CALLING = {"tools": [{"name": "look_up", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}


RESPONDING: dict[str, Any] = {
    "model": "tiny",
    "input": "t1 t2 t3",
    "max_output_tokens": 60,
    "temperature": 0,
    "stream": True,
}
CALLED = {"type": "function", "name": "look_up", "parameters": SCHEMA}
OF_AGENTS = {
    "message": (MESSAGES, TALKING),
    "message, tools": (MESSAGES, TALKING | CALLING),
    "response": (RESPONSES, RESPONDING),
    "response, tools": (RESPONSES, RESPONDING | {"tools": [CALLED], "tool_choice": "required"}),
}
_ITEM = re.compile(rb'"(?:item_)?id":"((?:msg|rs|fc)_[^"]+)"')


@pytest.mark.parametrize("direct", ["decode", "prefill"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize("kind", OF_AGENTS)
def test_a_stream_of_named_events_goes_on(kind: str, fault: dict[str, int], direct: str) -> None:
    path, values = OF_AGENTS[kind]

    async def scenario(site: Site) -> None:
        right = await alone(site, path, values)
        for role in ("decode", "prefill"):
            site.fleet.faults.set(f"{role}/0", **fault)
        answer = await site.send(path, values, headers=ID).end()
        same(answer, right)
        # As many names of items as in one engine's answer, each as often.
        named = [Counter(_ITEM.findall(one.body)) for one in (answer, right)]
        assert sorted(named[0].values()) == sorted(named[1].values())
        (record,) = await site.ended()
        assert (record.outcome, record.resumes, record.retries) == (Outcome.OK, 1, 0)

    flags = EXACT | {"idle_stream_timeout_s": 2.0, "direct": direct}
    play(scenario, flags=flags, reasoning_parser=True)


@pytest.mark.parametrize("said", [0, 1, 4, 11])
@pytest.mark.parametrize("broken", [3, 8, 12])
@pytest.mark.parametrize("kind", OF_AGENTS)
@served(flags=EXACT, reasoning_parser=True)
async def test_what_is_aborted_while_it_comes_again_ends_with_what_the_client_has(
    site: Site, kind: str, broken: int, said: int
) -> None:
    path, values = OF_AGENTS[kind]
    right = await alone(site, path, values)
    site.fleet.faults.set("decode/0", reset_after_tokens=broken)
    answer = site.send(path, values, headers=ID)
    engine = site.fleet.engine("decode/1")
    await site.until(
        lambda: any(one.sequences[0].choice.emitted >= said for one in engine.exchanges)
    )
    assert (await site.admin("/abort_requests", b"{}")).status == 200
    await answer.end()
    assert (answer.status, answer.error) == (200, None)
    texts, whole = said_in(answer.chunks), said_in(right.chunks)
    assert texts or broken == 3  # The first tokens of a call have no arguments.
    assert all(whole[place].startswith(text) for place, text in texts.items())
    if path == MESSAGES:
        kinds = Counter(one.partition(b"\n")[0] for one in answer.events)
        assert kinds[b"event: content_block_start"] == kinds[b"event: content_block_stop"]
        delta, stop = answer.chunks[-2:]
        assert (delta["delta"]["stop_reason"], stop["type"]) == (None, "message_stop")
    else:
        output = answer.chunks[-1]["response"]["output"]
        done = [one["item"] for one in answer.chunks if one["type"].endswith("item.done")]
        assert output == done
        assert [text for one in output if (text := text_of(one))] == list(texts.values())
        assert [one["sequence_number"] for one in answer.chunks] == [*range(len(answer.chunks))]
    (record,) = await site.ended()
    assert (record.outcome, record.resumes) == (Outcome.OK, 1)


def said_in(events: list[Any]) -> dict[int, str]:
    """Return the text of each block, or item, that a stream's deltas bring."""
    texts: dict[int, str] = {}
    for one in events:
        delta = one.get("delta")
        if isinstance(delta, dict):
            delta = next(
                (delta[key] for key in ("text", "thinking", "partial_json") if key in delta), ""
            )
        if delta:
            index = one.get("output_index", one.get("index"))
            texts[index] = texts.get(index, "") + delta
    return texts


def text_of(item: dict[str, Any]) -> str:
    content = item.get("content")
    text: str = content[0]["text"] if content else item["arguments"]
    return text


@pytest.mark.parametrize("flags", [EXACT, {"resume": "valid"}], ids=str)
@pytest.mark.parametrize(
    ("path", "values", "goes_on"),
    [
        (CHAT, TALK | {"tools": TOOLS, "stream": True}, "valid"),
        (CHAT, TALK | {"tools": TOOLS, "stream": True, "seed": -1}, "valid"),
        (COMPLETIONS, BODY | {"stream": True, "temperature": 0.5, "stop": "never"}, "valid"),
        (GENERATE, ASKED | {"stream": True, "sampling_params": {"stop": ["never"]}}, "valid"),
        (RESPONSES, RESPONDING | {"temperature": 0.7}, "valid"),
        (RESPONSES, RESPONDING | {"tools": [CALLED, {"type": "web_search"}]}, "exact valid"),
        (RESPONSES, RESPONDING | {"tools": [CALLED, {"type": "mcp", "server_label": "a"}]}, ""),
        # Its requests have no seed.
        (MESSAGES, TALKING | {"temperature": 0.7}, ""),
        (MESSAGES, TALKING | {"temperature": 0.7, "seed": 3}, ""),
        (CHAT, TALK | {"tools": TOOLS, "stream": True, "seed": 3}, "exact valid"),
    ],
)
@served("flags")
async def test_what_is_drawn_anew_goes_on_only_with_a_seed(
    site: Site, flags: dict[str, str], path: str, values: dict[str, Any], goes_on: str
) -> None:
    site.fleet.faults.set("decode/0", reset_after_tokens=5)
    exchange = await site.post(path, values)
    (record,) = await site.ended()
    goes = flags["resume"] in goes_on
    assert (record.resumes, record.outcome is Outcome.OK) == (goes, goes)
    assert exchange.error is None or not goes
    legs = [leg.values for leg in site.received("decode")]
    seeds = {leg.get("sampling_params", leg).get("seed") for leg in legs}
    assert len(seeds) == 1
    if goes and "seed" not in values:
        assert seeds == {record.seed}


@served(flags=EXACT, ranks=4)
async def test_a_stream_kills_few_ranks(site: Site) -> None:
    values = STREAMS[CHAT] | KINDS["required"][1]
    right = await alone(site, CHAT, values)
    site.fleet.faults.set("decode", reset_after_tokens=9)
    exchange = await site.post(CHAT, values, ID)
    assert not exchange.done
    assert b"two engines died" in exchange.body
    # It died before it came to something new, so the client has what the first one said.
    told, all_told = ([e for e in one.events if b"arguments" in e] for one in (exchange, right))
    assert 0 < len(told) < len(all_told)
    (record,) = await site.ended()
    assert (record.outcome, record.output_tokens) == (Outcome.UPSTREAM_ERROR, 9)
    assert len(site.received("decode")) == 2


SPANS = re.compile(rb'"weight_versions":\[[^]]*\]')  # Of those before it broke nobody knows.
# Those whose events are parsed, from ids and from the beginning.
PARSED: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: KINDS[kind] for kind in ("tools", "ids", "several", "logprobs", "text of ids")},
    "stop strings": (CHAT, {"stop": ["never said"]}),
    "generated ids": (GENERATE, {}),
    "message": (MESSAGES, TALKING),
    "response": (RESPONSES, RESPONDING),
}


@pytest.mark.parametrize("breaks", [{}, {"reset_after_tokens": 7}], ids=["whole", "broken"])
@pytest.mark.parametrize("ends", [MalformedStream.CR, MalformedStream.CRLF], ids=lambda e: e.value)
@pytest.mark.parametrize("kind", PARSED)
@served(flags=EXACT)
async def test_nothing_is_lost_whatever_ends_the_lines(
    site: Site, kind: str, ends: MalformedStream, breaks: dict[str, int]
) -> None:
    path, more = PARSED[kind]
    values = ASKED_OF.get(path, {}) | more
    right = await alone(site, path, values)
    site.fleet.faults.set("decode", malformed=ends)
    site.fleet.faults.set("decode/0", malformed=ends, **breaks)
    answer = await site.send(path, values, headers=ID).end()
    body = answer.body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert answer.error is None
    told, wanted = (SPANS.sub(b"", comparable(one, "mine")) for one in (body, right.body))
    assert told == wanted
    (record,) = await site.ended()
    assert (record.outcome, record.resumes) == (Outcome.OK, len(breaks))


@pytest.mark.parametrize(("path", "name"), [(CHAT, b""), (MESSAGES, b"event: error\n")])
@served(flags=EXACT, at_rest=False)
async def test_an_answer_that_begins_otherwise_ends_with_an_error(
    site: Site, path: str, name: bytes
) -> None:
    """The other engine says the same, but for one word."""
    values = {CHAT: STREAMS[CHAT] | {"unheard_of": 1}, MESSAGES: TALKING}[path]
    right = await alone(site, path, values)
    events = [event + b"\n\n" for event in right.body.split(b"\n\n")[:-1]]
    tenth = events[9].replace(b'":" t', b'":" u')
    assert tenth != events[9]

    def otherwise(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del request
        reply.start(200, [(b"content-type", b"text/event-stream")])
        if engine == "decode/0":
            reply.write(b"".join(events[:12]))
            reply.abort()
        else:
            reply.write(b"".join([*events[:9], tenth, *events[10:]]))
            reply.end()

    site.rank_handlers[path.encode()] = otherwise
    exchange = await site.post(path, values, ID)
    (record,) = await site.ended()
    assert (record.outcome, record.resumes) == (Outcome.UPSTREAM_ERROR, 1)
    assert exchange.body.startswith(b"".join(events[:12]))
    last = exchange.body[len(b"".join(events[:12])) :]
    assert last.startswith(name + b"data: {")
    assert b"goes on otherwise" in last
    assert exchange.error is not None


@served(flags=EXACT | {"idle_stream_timeout_s": 5.0})
async def test_nobody_waits_for_ever_for_an_answer_to_begin_again(site: Site) -> None:
    values = STREAMS[CHAT] | {"unheard_of": 1, "max_tokens": 400}
    site.fleet.faults.set("decode/0", reset_after_tokens=300)
    exchange = await site.post(CHAT, values, ID)
    assert b"to begin the answer again took longer than 5 s" in exchange.body
    (record,) = await site.ended()
    assert (record.outcome, record.resumes) == (Outcome.UPSTREAM_ERROR, 1)
    assert record.output_tokens == 300


@pytest.mark.parametrize("order", ["remove", "drain"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@served(flags=EXACT)
async def test_an_engine_that_goes_takes_no_stream_with_it(
    site: Site, path: str, order: str
) -> None:
    values = {CHAT: STREAMS[CHAT] | {"tools": TOOLS}, MESSAGES: TALKING}[path]
    values |= {"max_tokens": 200}
    right = await alone(site, path, values)
    exchange = site.send(path, values, headers=ID)
    await exchange.until_events(20)
    (on,) = site.received("decode")
    gone: dict[str, Any] = {"role": "decode", "url": site.fleet.engine(on.engine).url}
    gone |= {"force": True} if order == "remove" else {"deadline_s": 0}
    assert (await site.admin(f"/admin/instances/{order}", gone)).status == 200
    same(await exchange.end(), right)
    assert (await site.ended())[0].resumes == 1


@served(connector="mooncake-ascend", flags=EXACT)
async def test_a_request_that_is_handed_back_begins_again(site: Site) -> None:
    values = STREAMS[CHAT] | KINDS["required"][1]
    right = await alone(site, CHAT, values)
    site.fleet.faults.set("decode/0", recomputed_after_tokens=9)
    same(await site.send(CHAT, values, headers=ID).end(), right)
    (record,) = await site.ended()
    assert (record.recomputes, record.resumes, record.retries) == (1, 0, 0)


@pytest.mark.parametrize("kind", ["required", "schema", "several chats"])
@served()
async def test_a_whole_answer_is_asked_for_once_more(site: Site, kind: str) -> None:
    values = TALK | {"temperature": 0} | KINDS[kind][1]
    right = await alone(site, CHAT, values)
    site.fleet.faults.set("decode/0", reset_after_tokens=3)
    same(await site.send(CHAT, values, headers=ID).end(), right)
    (record,) = await site.ended()
    assert (record.resumes, record.retries) == (0, 1)


@served()
async def test_without_the_setting_nothing_begins_again(site: Site) -> None:
    site.fleet.faults.set("decode/0", reset_after_tokens=5)
    assert not (await site.post(CHAT, STREAMS[CHAT] | {"tools": TOOLS})).done
    assert len(site.received("decode")) == 1


@served(flags=EXACT, prefillers=1, prefix_cache_tokens=4096, prompt_tokens_details=True)
async def test_usage_tells_what_the_first_prefill_had_cached(site: Site) -> None:
    turn = {"role": "user", "content": " ".join(f"t{one}" for one in range(200))}
    values = STREAMS[CHAT] | USAGE | {"tools": TOOLS, "messages": [turn]}
    site.fleet.faults.set("decode/0", reset_after_tokens=5)
    exchange = await site.post(CHAT, values)
    (record,) = await site.ended()
    assert (record.resumes, record.cached_tokens) == (1, 0)
    assert exchange.chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
