"""The public interface: what is served to whom, what is refused and how, and what engines get of it."""

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.live.frontend.gateway_requests import BODY, OWN, TALK, is_error
from tests.support.site import Seen, Site, served

from balanceroute import __version__
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.live.telemetry.request_log import line_of

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATION = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages")
PASSED_ON = {
    "/v1/models": "GET, HEAD",
    "/v1/embeddings": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/audio/transcriptions": "POST",
}
STREAM: dict[str, Any] = BODY | {"stream": True}


# Routes.


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//v1/completions",
        "/v1//completions",
        "/v1/../v1/completions",
        "/v1/completions//",
        "/v1/completions/x",
        "/V1/COMPLETIONS",
        "/v1/completions%20",
        "/v1/%63ompletions",
        "/v1/completions;x=1",
        "/v1",
        "/metrics//",
        "//metrics",
        "/health/x",
        "/admin/state",
        "/v1/load_lora_adapter",
        "/sleep",
        "/emulation/kill",
        "/docs",
        "/v1/metaserver",
        "/v1/metaserver/",
        "/v1/metaserver/guess",
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/v1/realtime",
        "/invocations",
        "/server_info",
        "/abort_requests",
    ],
)
@served()
async def test_every_other_path_is_404_and_reaches_no_engine(site: Site, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
        is_error(await site.send(path, BODY, method=method).end(), 404)
    assert site.seen == []


@served()
async def test_a_known_path_takes_its_method_alone(site: Site) -> None:
    allowed = dict.fromkeys(GENERATION, "POST") | PASSED_ON | dict.fromkeys(OWN, "GET, HEAD")
    for path, methods in allowed.items():
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            if method in methods.split(", "):
                continue
            refused = await site.send(path, BODY, method=method).end()
            is_error(refused, 405)
            assert refused.header(b"allow") == methods.encode()
    assert site.seen == []


@served()
async def test_a_query_is_not_part_of_the_path(site: Site) -> None:
    assert (await site.post(f"{COMPLETIONS}?a=/../b&c", BODY)).status == 200
    assert (await site.get("/health?verbose=1")).status == 200
    # An engine is called as the scheduler wants it, whatever the client appended.
    assert {seen.request.query for seen in site.seen} == {b""}
    assert {seen.path for seen in site.seen} == {COMPLETIONS}


@served()
async def test_a_query_of_a_request_that_is_passed_on_is_passed_on(site: Site) -> None:
    assert (await site.get("/v1/models?limit=1")).status == 200
    assert [(seen.path, seen.request.query) for seen in site.seen] == [("/v1/models", b"limit=1")]


# The proxy's own pages.


@served()
async def test_health_and_version_are_answered_by_the_proxy_itself(site: Site) -> None:
    for engine in site.fleet.engines:
        engine.kill()
    for method in ("GET", "HEAD"):
        health = await site.send("/health", method=method).end()
        assert (health.status, health.body) == (200, b"")
    version = await site.get("/version")
    assert version.json == {"version": __version__}
    head = await site.send("/version", method="HEAD").end()
    assert (head.status, head.body) == (200, b"")
    assert head.header(b"content-length") == version.header(b"content-length")
    assert site.seen == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
@served()
async def test_ready_is_503_while_no_engine_of_a_role_is_up(site: Site, role: str) -> None:
    assert (await site.get("/ready")).status == 200
    engines = [engine for engine in site.fleet.engines if engine.name.startswith(role)]
    first, last = engines
    first.kill()
    await asyncio.sleep(5.0)
    assert (await site.get("/ready")).status == 200
    last.kill()
    await asyncio.sleep(5.0)
    unready = await site.get("/ready")
    is_error(unready, 503)
    assert unready.header(b"retry-after") == b"1"
    await site.fleet.restore(last.name)
    await asyncio.sleep(10.0)
    assert (await site.get("/ready")).status == 200


@served()
async def test_a_draining_proxy_is_not_ready_and_takes_no_request(site: Site) -> None:
    site.world.proxy.deployment.driver.draining = True
    is_error(await site.get("/ready"), 503)
    assert (await site.get("/health")).status == 200
    refused = await site.post(COMPLETIONS, BODY)
    assert "shutting down" in is_error(refused, 503)
    assert refused.header(b"retry-after") == b"1"
    assert site.seen == []


@served()
async def test_metrics_are_a_page_that_prometheus_reads(site: Site) -> None:
    await site.post(COMPLETIONS, BODY)
    await site.post(COMPLETIONS, b"[]")
    page = await site.get("/metrics")
    assert page.status == 200
    assert (page.header(b"content-type") or b"").startswith(b"text/plain; version=")
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.body.decode())
        for sample in family.samples
    }
    for outcome, model, status in (("ok", "tiny", "200"), ("client_error", "other", "400")):
        labels = (
            ("endpoint", COMPLETIONS),
            ("model", model),
            ("outcome", outcome),
            ("status", status),
        )
        assert values["balanceroute_requests_total", labels] == 1


# Request ids.


def ids(seen: list[Seen]) -> list[bytes | None]:
    return [one.header(b"x-request-id") for one in seen]


@pytest.mark.parametrize("given", [b"a", b"A-1_b.c:d", b"x" * 128])
@served()
async def test_a_request_id_is_kept_from_end_to_end(site: Site, given: bytes) -> None:
    headers = [(b"x-request-id", given)]
    for answer in (
        await site.post(CHAT, TALK, headers),
        await site.post(COMPLETIONS, STREAM, headers),
        await site.get("/v1/models", headers),
    ):
        assert answer.status == 200
        assert answer.header(b"x-request-id") == given
    assert ids(site.seen) == [given] * 5
    assert [record.request_id for record in site.world.ended] == [given.decode()] * 3


@served()
async def test_a_request_without_an_id_gets_one(site: Site) -> None:
    answers = [await site.post(COMPLETIONS, BODY) for _ in range(2)]
    given = [answer.header(b"x-request-id") for answer in answers]
    assert ids(site.seen) == [given[0]] * 2 + [given[1]] * 2
    assert given[0] != given[1]
    assert all(re.fullmatch(rb"[0-9a-f]{32}", one or b"") for one in given)


@served()
async def test_a_refusal_tells_the_request_id_too(site: Site) -> None:
    refused = await site.post(COMPLETIONS, b"{", [(b"x-request-id", b"mine")])
    is_error(refused, 400)
    assert refused.header(b"x-request-id") == b"mine"


@pytest.mark.parametrize(
    ("values", "logged"),
    [
        ([b""], None),
        ([b"x" * 129], "x" * 129),
        ([b"x" * 1_000], "x" * 256),
        ([b"a b"], "a b"),
        ([b"\xc3\xa4\xff"], "\u00e4\\xff"),
        ([b'a"b'], 'a"b'),
        ([b"a\\b"], "a\\b"),
        ([b"a", b"b"], "a, b"),
    ],
)
@served()
async def test_a_request_id_that_cannot_be_kept_is_replaced_and_logged(
    site: Site, values: list[bytes], logged: str | None
) -> None:
    headers = [(b"x-request-id", value) for value in values]
    for stream in (False, True):
        answer = await site.post(COMPLETIONS, BODY | {"stream": stream}, headers)
        assert answer.status == 200
        own = answer.header(b"x-request-id")
        assert own is not None
        assert own not in values
        assert {one.header(b"x-request-id") for one in site.seen} == {own}
        site.seen.clear()
    assert (await site.get("/v1/models", headers)).status == 200
    is_error(await site.get("/v1/nothing", headers), 404)
    records = await site.ended(4)
    for record in records:
        line = json.loads(line_of(record))
        assert line.get("client_request_id") == logged
        assert line["request_id"].encode() not in values
    if logged is not None:
        # Who knows the client's word alone finds the request.
        found = (await site.admin(f"/admin/requests?id={quote(logged)}")).json["requests"]
        assert len(found) == 4


@pytest.mark.parametrize(
    "value", [b"1-a/g6hr", b"q83vEjRWeJCrze8SNFZ4kA==", b"a+b", b"7d3a#12", b"me@host", b"{1b2c}"]
)
@served()
async def test_a_request_id_of_visible_characters_is_kept_end_to_end(
    site: Site, value: bytes
) -> None:
    # Twice the same says the same.
    for headers in ([(b"x-request-id", value)], [(b"x-request-id", value)] * 2):
        answer = await site.post(COMPLETIONS, STREAM, headers)
        assert (answer.status, answer.done) == (200, True)
        assert [v for n, v in answer.headers if n == b"x-request-id"] == [value]
    assert {one.header(b"x-request-id") for one in site.seen} == {value}
    for record in await site.ended(2):
        assert json.loads(line_of(record))["request_id"].encode() == value


@served()
async def test_a_slash_behind_a_path_is_no_other_path(site: Site) -> None:
    for path in (COMPLETIONS, "/tokenize"):
        assert (await site.post(f"{path}/", BODY)).status == 200
    for path in ("/v1/models", "/health", "/metrics"):
        plain, slashed = await site.get(path), await site.get(f"{path}/?a=b")
        assert (plain.status, plain.header(b"content-type")) == (
            slashed.status,
            slashed.header(b"content-type"),
        )
    is_error(await site.get(f"{COMPLETIONS}/"), 405)
    assert not [seen for seen in site.seen if seen.path.endswith("/")]
    assert [record.endpoint for record in await site.ended(5)] == [
        *(COMPLETIONS, "/tokenize", "/v1/models", "/v1/models", COMPLETIONS)
    ]


@pytest.mark.parametrize("value", [b"", b"0", b"-3", b"1e3", b"many", b"1" * 10])
@served()
async def test_a_malformed_hint_is_refused(site: Site, value: bytes) -> None:
    headers = [(b"x-expected-output-tokens", value)]
    answer = await site.post(COMPLETIONS, BODY, headers)
    assert "X-Expected-Output-Tokens" in is_error(answer, 400)
    assert site.seen == []


@served()
async def test_an_id_that_is_in_use_is_another_one_at_the_engines(site: Site) -> None:
    headers = [(b"x-request-id", b"same")]
    bodies = [STREAM | {"prompt": f"t{i}", "max_tokens": 20} for i in range(3)]
    alone = [await site.ask("decode/0", COMPLETIONS, body) for body in bodies]
    site.seen.clear()
    exchanges = [site.send(COMPLETIONS, body, headers=headers) for body in bodies]
    for exchange, right in zip(exchanges, alone, strict=True):
        await exchange.end()
        assert exchange.done
        assert exchange.text == right.text
        assert exchange.header(b"x-request-id") == b"same"
    by_prompt = {
        prompt: {s.header(b"x-request-id") for s in site.seen if s.values["prompt"] == prompt}
        for prompt in ("t0", "t1", "t2")
    }
    # Both legs of a request have one name, and no two requests have the same.
    assert all(len(names) == 1 for names in by_prompt.values())
    names = set[bytes | None]().union(*by_prompt.values())
    assert len(names) == 3
    assert b"same" in names
    assert all(re.fullmatch(rb"same(-[0-9a-f]{8})?", name or b"") for name in names)
    # Later it is free again.
    site.seen.clear()
    await site.post(COMPLETIONS, BODY, headers)
    assert ids(site.seen) == [b"same"] * 2


# What reaches an engine.

INTERNAL = {
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_host": "169.254.169.254",
        "remote_port": 80,
        "remote_engine_id": "theirs",
        "remote_block_ids": [[7]],
        "remote_request_id": "theirs",
        "metaserver": "http://169.254.169.254",
        "transfer_id": "theirs",
    },
    "ec_transfer_params": {"a": 1},
    "bootstrap_host": "169.254.169.254",
    "bootstrap_port": 80,
    "bootstrap_room": 7,
    "data_parallel_rank": 1,
    "disagg_prefill_resp": {"a": 1},
    "disagg_spec": {"a": 1},
    "metaserver": "http://169.254.169.254",
    "priority": -999,
    "remote_kv_source": "http://169.254.169.254",
    "request_id": "theirs",
    "ret_first_tok": True,
}
ROUTING: "Headers" = [
    (b"x-data-parallel-rank", b"1"),
    (b"x-prefiller-host-port", b"169.254.169.254:80"),
    (b"x-forwarded-for", b"169.254.169.254"),
    (b"forwarded", b"for=169.254.169.254"),
    (b"x-return-error", b"1"),
    (b"cookie", b"169.254.169.254"),
    (b"x-llm-d-rank", b"1"),
    (b"te", b"trailers"),
    (b"accept-encoding", b"gzip"),
    (b"x-http-method-override", b"DELETE"),
]


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake-ascend", "mooncake-layerwise"])
@pytest.mark.parametrize("direct", [False, True])
@served("connector")
async def test_a_clients_routing_fields_reach_no_engine(
    site: Site, connector: str, direct: bool
) -> None:
    await asyncio.sleep(1.0)
    extra = {"prompt": ["t1 t2", "t3"]} if direct else {}
    for stream in (False, True):
        answer = await site.post(
            COMPLETIONS, STREAM | INTERNAL | extra | {"stream": stream}, ROUTING
        )
        assert answer.status == 200, answer.body
    sent = [seen for seen in site.seen if seen.path == COMPLETIONS]
    assert len(sent) == (2 if direct else 4)
    for seen in sent:
        values = seen.values
        own = values.pop("kv_transfer_params", {})
        assert not {"theirs", "169.254.169.254", "http://169.254.169.254"} & {
            value for value in own.values() if isinstance(value, str)
        }
        assert not values.keys() & INTERNAL.keys()
        names = sorted(name for name, _ in seen.request.headers)
        known = [b"accept-encoding", b"content-length", b"content-type", b"host"]
        assert names == [*known, b"x-request-id"]
        assert seen.header(b"accept-encoding") == b"identity"
        assert bool(own) != direct


@served()
async def test_a_clients_headers_for_tracing_reach_the_engines(site: Site) -> None:
    passed = [(b"user-agent", b"me"), (b"traceparent", b"00-1-2-01"), (b"tracestate", b"a=b")]
    await site.post(COMPLETIONS, BODY, passed)
    for seen in site.seen:
        assert [pair for pair in seen.request.headers if pair in passed] == passed


@pytest.mark.parametrize("field", sorted(INTERNAL))
@served()
async def test_extra_arguments_that_would_route_are_refused(site: Site, field: str) -> None:
    refused = await site.post(COMPLETIONS, BODY | {"vllm_xargs": {field: "{}"}})
    assert field in is_error(refused, 400)
    assert site.seen == []


@served()
async def test_members_that_no_leg_changes_reach_it_byte_for_byte(site: Site) -> None:
    members = b'"seed" :  12345678901234567890123456789012,"temperature":1E-0 , "user":"\\u00e4\\/"'
    body = b'{"model":"tiny","prompt":"t1", %b,\n"max_tokens":3}' % members
    assert (await site.post(COMPLETIONS, body)).status == 200
    prefill, decode = site.seen
    assert b'"seed" :  12345678901234567890123456789012' in prefill.request.body
    assert b'"temperature":1E-0' in decode.request.body
    assert b'"user":"\\u00e4\\/"' in prefill.request.body
    assert b'"user":"\\u00e4\\/"' in decode.request.body


# Bodies.


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"null", "object"),
        (b"[1,2]", "object"),
        (b'"text"', "object"),
        (b"7", "object"),
        (b'{"prompt":"a"} x', "JSON"),
        (b'{"prompt":"a",}', "JSON"),
        (b'{"prompt":NaN}', "NaN"),
        (b'{"prompt":"a","temperature":Infinity}', "Infinity"),
        (b'{"prompt":"a","temperature":-Infinity}', "Infinity"),
        (b'{"max_tokens":1,"prompt":"a","max_tokens":2}', "twice"),
        (b'{"max_tokens":1,"prompt":"a","max\\u005ftokens":2}', "twice"),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"prompt":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}", "deep"),
        (b'{"prompt":"\xff"}', "UTF-8"),
        (b'{"prompt":"\xed\xa0\x80"}', "UTF-8"),
        (b"\x00", "JSON"),
        (b'{"prompt":"a","seed":' + b"9" * 5_000 + b"}", "JSON"),
        (b'{"prompt":"a","n":0}', "n must"),
        (b'{"prompt":"a","n":129}', "n must"),
        (b'{"prompt":"a","n":1000000000000}', "n must"),
        (b'{"prompt":"a","n":false}', "n must"),
        (b'{"prompt":"a","n":"two"}', "n must"),
        (b'{"prompt":"a","priority":9223372036854775808}', "less than or equal to 92233720368"),
        (b'{"prompt":["a","b"],"n":128}', "256 answers"),
        (b'{"prompt":"a","stream":2}', "stream must"),
        (b'{"prompt":"a","model":7}', "model must"),
    ],
)
@served()
async def test_a_bad_body_is_the_clients_error(site: Site, body: bytes, word: str) -> None:
    assert word in is_error(await site.post(COMPLETIONS, body), 400)
    assert site.seen == []
    (record,) = site.world.ended
    assert record.status == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@served()
async def test_a_lone_surrogate_is_answered_as_an_engine_answers_it(site: Site, path: str) -> None:
    text = '"t1 \\ud800"' if path == COMPLETIONS else '[{"role":"user","content":"t1 \\ud800"}]'
    name = "prompt" if path == COMPLETIONS else "messages"
    body = f'{{"model":"tiny","max_tokens":3,"{name}":{text}}}'.encode()
    answer = await site.post(path, body)
    alone = await site.ask("decode/0", path, body)
    assert answer.status == alone.status < 500
    assert answer.text == alone.text


HALF, HUGE = "\ud800", 10**30


@pytest.mark.parametrize(
    "changes",
    [
        {"model": HALF},
        {HALF: 1},
        {"user": HALF},
        {"stop": [HALF]},
        {"cache_salt": HALF},
        {"max_tokens": HUGE},
        {"min_tokens": HUGE},
        {"n": HUGE},
        {"seed": HUGE},
        {"priority": HUGE},
        {"prompt": [HUGE]},
        {"previous_response_id": HALF},
        {"stream_options": {HALF: HALF}, "stream": True},
    ],
    ids=str,
)
@served()
async def test_what_few_parsers_take_is_answered_and_nobody_else_notices(
    site: Site, changes: dict[str, Any]
) -> None:
    values = BODY | {"max_tokens": 20}
    others = [site.send(COMPLETIONS, values) for _ in range(2)]
    strange = site.send(COMPLETIONS, values | changes)
    others += [site.send(COMPLETIONS, values) for _ in range(2)]
    for one in (strange, *others):
        await one.end()
    assert strange.status in (200, 400, 404)
    assert [one.status for one in others] == [200] * 4
    assert len(await site.ended(5)) == 5


@served(flags={"model": ["tiny"]})
async def test_a_lone_surrogate_in_a_name_of_a_model_is_no_error_of_the_proxy(site: Site) -> None:
    answer = await site.post(COMPLETIONS, b'{"model":"\\ud800","prompt":"t1"}')
    is_error(answer, 404)
    assert site.world.ended[0].model == "\ud800"


@served(flags={"body_limit_bytes": 4_096})
async def test_a_body_past_the_limit_is_413(site: Site) -> None:
    for path in (COMPLETIONS, "/tokenize"):
        is_error(await site.post(path, BODY | {"prompt": "t" * 5_000}), 413)
    assert site.seen == []


# What the engines refuse.


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (COMPLETIONS, BODY | {"model": "another"}),
        (COMPLETIONS, BODY | {"max_tokens": 0}),
        (COMPLETIONS, BODY | {"max_tokens": -3}),
        (COMPLETIONS, BODY | {"max_tokens": "many"}),
        (COMPLETIONS, BODY | {"max_tokens": 4096}),
        (COMPLETIONS, BODY | {"max_tokens": 10**9}),
        (COMPLETIONS, BODY | {"prompt": "t " * 4_097}),
        (COMPLETIONS, BODY | {"prompt": "t " * 4_090, "max_tokens": 50}),
        (COMPLETIONS, BODY | {"prompt": 7}),
        (COMPLETIONS, BODY | {"prompt": ""}),
        (COMPLETIONS, {"model": "tiny"}),
        (COMPLETIONS, BODY | {"min_tokens": 99}),
        (COMPLETIONS, BODY | {"temperature": "hot"}),
        (COMPLETIONS, BODY | {"stop": [""]}),
        (COMPLETIONS, BODY | {"stream_options": {"include_usage": True}}),
        (COMPLETIONS, STREAM | {"prompt_logprobs": 2}),
        (CHAT, TALK | {"model": "another"}),
        (CHAT, TALK | {"max_completion_tokens": 0}),
        (CHAT, TALK | {"messages": "hello"}),
        (CHAT, {"model": "tiny"}),
        (CHAT, TALK | {"tool_choice": "required"}),
        (CHAT, TALK | {"messages": [{"role": "user", "content": "t " * 4_097}], "stream": True}),
    ],
)
@served()
async def test_an_engines_refusal_is_passed_on_byte_for_byte(
    site: Site, path: str, values: dict[str, Any]
) -> None:
    answer = await site.post(path, values)
    alone = await site.ask("decode/0", path, values)
    assert 400 <= alone.status < 500, alone.body
    assert (answer.status, answer.body) == (alone.status, alone.body)
    assert answer.header(b"content-type") == alone.header(b"content-type")


@served(flags={"model": ["tiny"]})
async def test_a_model_that_is_not_on_the_list_is_refused_in_vllms_words(site: Site) -> None:
    for path, values in ((COMPLETIONS, BODY), (CHAT, TALK)):
        refused = await site.post(path, values | {"model": "another"})
        alone = await site.ask("decode/0", path, values | {"model": "another"})
        assert (refused.status, refused.json) == (404, alone.json)
    assert [seen for seen in site.seen if seen.engine.startswith("prefill")] == []
    assert (await site.post(COMPLETIONS, BODY)).status == 200
    nameless = {name: value for name, value in BODY.items() if name != "model"}
    assert (await site.post(COMPLETIONS, nameless)).status == 200


# Too much at a time.


@served(flags={"queue_limit": 3})
async def test_a_full_queue_refuses_with_429(site: Site) -> None:
    exchanges = [site.send(COMPLETIONS, STREAM | {"prompt": f"t{i}"}) for i in range(8)]
    answers = [await exchange.end() for exchange in exchanges]
    assert sorted(answer.status for answer in answers) == [200] * 3 + [429] * 5
    for answer in answers:
        if answer.status == 429:
            is_error(answer, 429)
            assert int(answer.header(b"retry-after") or b"") >= 1
    assert {seen.values["prompt"] for seen in site.seen} == {"t0", "t1", "t2"}
    assert (await site.post(COMPLETIONS, BODY)).status == 200


@served()
async def test_everything_is_refused_at_once_while_a_role_is_down(site: Site) -> None:
    for name in ("decode/0", "decode/1"):
        site.fleet.kill(name)
    await asyncio.sleep(5.0)
    begin_s = site.loop.time()
    refused = await site.post(COMPLETIONS, STREAM)
    is_error(refused, 503)
    assert refused.header(b"retry-after") == b"1"
    assert site.loop.time() - begin_s < 0.05
    assert site.received("prefill") == []


@served()
async def test_an_answer_has_no_header_of_the_engines_connection(site: Site) -> None:
    for answer in (await site.post(COMPLETIONS, BODY), await site.post(COMPLETIONS, STREAM)):
        names = {name for name, _ in answer.headers}
        assert names <= {
            *(b"content-type", b"content-length", b"transfer-encoding"),
            *(b"date", b"server", b"vary"),
            *(b"x-accel-buffering", b"x-request-id"),
        }
    assert json.loads(answer.events[0].removeprefix(b"data: "))["model"] == "tiny"


# Large bodies, which are read in slices.

SLICED = STREAM | {"logit_bias": {str(i): 1 for i in range(30_000)}}


@served()
async def test_a_large_body_is_served_and_reaches_the_engines_as_it_came(site: Site) -> None:
    sent = json.dumps(SLICED, indent=1).encode()
    answer = await site.post(COMPLETIONS, sent)
    assert answer.status == 200
    assert answer.done
    (decode,) = site.received("decode", COMPLETIONS)
    kept = sent[sent.index(b'"logit_bias"') : -2]
    assert kept in decode.request.body
    values = json.loads(decode.request.body)
    assert {key: values[key] for key in SLICED} == SLICED


@served()
async def test_a_large_body_that_is_malformed_is_refused(site: Site) -> None:
    sent = json.dumps(SLICED).encode()
    message = is_error(await site.post(COMPLETIONS, sent[:-1]), 400)
    assert message.startswith("the body is not valid JSON: ")
    message = is_error(await site.post(COMPLETIONS, SLICED | {"vllm_xargs": "x" * 140_000}), 400)
    assert message == "vllm_xargs is larger than 131,072 bytes"
    assert site.seen == []


@pytest.mark.parametrize("body", [BODY, SLICED])
@served()
async def test_a_request_that_fails_here_is_answered_all_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(site.world.proxy.deployment.driver, "submit", fail)
    message = is_error(await site.post(COMPLETIONS, body), 500)
    assert message == "internal error; the proxy's log says more"
    assert [record.outcome for record in site.world.ended] == [Outcome.INTERNAL_ERROR]
