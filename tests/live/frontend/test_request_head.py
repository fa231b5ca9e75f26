"""The head of a client's request: who it is from, and the little of it that reaches an engine."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.live.frontend.gateway_requests import BODY, OWN, TALK, is_error, keys
from tests.support.site import Site, play, served

from balanceroute.proxy.core.admission import Allowance
from balanceroute.proxy.live.frontend.request_head import (
    EVERYBODY,
    Clients,
    allowance_headers,
    client_request_id,
    duration,
    engine_lines,
    key_headers,
    named_in_body,
    named_in_head,
    passed_headers,
    refuse_model,
    session_of,
    trace_headers,
)
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.security import Secret, Tenant, digest_of
from balanceroute.proxy.wire.http1.heads import encode_fields
from balanceroute.proxy.wire.messages import Headers

KEY = Secret(b"sk-client")
ENGINE_KEY = Secret(b"sk-engine")


def fields(*headers: tuple[bytes, bytes]) -> Headers:
    return list(headers)


def made(headers: Headers, *, engine_key: Secret | None = None, keep: bool = False) -> Headers:
    passed = passed_headers(headers, keep_key=keep and engine_key is None)
    more = (key_headers(engine_key), passed, trace_headers(headers))
    lines = engine_lines("r-1", *map(encode_fields, more)).split(b"\r\n")
    return [(name, value) for name, _, value in (one.partition(b": ") for one in lines) if name]


OURS = [
    (b"content-type", b"application/json"),
    (b"x-request-id", b"r-1"),
    (b"accept-encoding", b"identity"),
]


@pytest.mark.parametrize("value", [b"a", b"req-1.2_3:4", b"A" * 128, b"!#[]{}/+=@~", b"a,b"])
def test_a_plain_request_id_is_taken(value: bytes) -> None:
    given = (b"x-request-id", value)
    assert client_request_id(fields(given)) == (value.decode(), "")
    assert client_request_id(fields(given, given)) == (value.decode(), "")


def test_a_request_need_not_have_an_id() -> None:
    assert client_request_id(fields((b"x-other", b"a"))) == ("", "")


@pytest.mark.parametrize(
    "value",
    [b"", b" ", b"a b", b"a\r\nx: y", b"a\n", b"a\0", b"A" * 129, b"A" * 3_000, b"\xc3\xa9"],
)
def test_a_request_id_that_is_no_plain_word_is_for_the_log_alone(value: bytes) -> None:
    kept, logged = client_request_id(fields((b"x-request-id", value)))
    assert (kept, logged) == ("", value[:256].decode())


def test_two_request_ids_that_differ_are_none() -> None:
    given = fields((b"x-request-id", b"a"), (b"x-request-id", b"b"))
    assert client_request_id(given) == ("", "a, b")


@pytest.mark.parametrize(
    "name",
    [
        b"host",
        b"connection",
        b"transfer-encoding",
        b"content-length",
        b"content-type",
        b"content-encoding",
        b"expect",
        b"cookie",
        b"forwarded",
        b"x-forwarded-for",
        b"x-data-parallel-rank",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-llm-d-slo-ttft-ms",
        b"x-return-error",
        b"x-request-id",
        b"authorization",
        b"proxy-authorization",
        b"accept-encoding",
        b"api-key",
    ],
)
def test_a_header_that_is_not_on_the_list_reaches_no_engine(name: bytes) -> None:
    assert made([(name, b"999")]) == OURS


def test_a_trace_goes_on_through_the_engine() -> None:
    passed = [
        (b"user-agent", b"openai"),
        (b"traceparent", b"00-1-2-01"),
        (b"tracestate", b"a=b"),
    ]
    assert made([(b"cookie", b"a"), *passed]) == OURS + passed


def test_the_clients_key_reaches_the_engine_only_if_it_is_the_engines() -> None:
    headers = [(b"authorization", b"Bearer sk-client")]
    assert made(headers) == OURS
    assert made(headers, keep=True) == OURS + headers


@pytest.mark.parametrize("keep", [False, True])
def test_the_engines_own_key_replaces_the_clients(*, keep: bool) -> None:
    headers = made([(b"authorization", b"Bearer sk-client")], engine_key=ENGINE_KEY, keep=keep)
    assert headers == [*OURS, (b"authorization", b"Bearer sk-engine")]


# Who a client is by its keys, what it may ask for, and what it is told of its limits.


OTHER = Secret(b"other")
ACME = Tenant("acme", (digest_of(b"sk-a"), digest_of(b"sk-b")), models=("m", "n"))
WALK_IN = Tenant("walk-in", default=True)
S = 1_000_000_000


def bearer(key: bytes) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key


def x_api_key(key: bytes) -> tuple[bytes, bytes]:
    return b"x-api-key", key


def test_without_keys_all_may_come_whatever_they_give() -> None:
    for headers in ([], [bearer(b"x")], [bearer(b"x")] * 2):
        assert Clients(()).find(headers) is EVERYBODY


@pytest.mark.parametrize("value", [b"Bearer sk-client", b"bearer sk-client", b"BEARER  sk-client"])
def test_the_key_authorises_whatever_the_case_of_its_scheme(value: bytes) -> None:
    assert Clients([OTHER, KEY]).find([(b"authorization", value)]) is EVERYBODY


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"sk-client",
        b"Basic sk-client",
        b"Bearer sk-clien",
        b"Bearer sk-clientt",
        b"Bearer SK-CLIENT",
        b"Bearer sk-client sk-client",
        b"Bearer " + b"x" * 1_000_000,
    ],
)
def test_nothing_but_the_key_authorises(value: bytes) -> None:
    assert Clients([KEY]).find([(b"authorization", value)]) is None


def test_a_missing_or_a_second_key_does_not_authorise() -> None:
    clients = Clients([KEY])
    assert clients.find([]) is None
    assert clients.find([bearer(b"sk-client")] * 2) is None
    assert clients.find([bearer(b"sk-client"), x_api_key(b"sk-client")]) is EVERYBODY
    assert clients.find([bearer(b"sk-client"), x_api_key(b"wrong")]) is None


def test_a_tenant_is_known_by_each_of_its_keys() -> None:
    clients = Clients((), [ACME, WALK_IN])
    assert clients.find([bearer(b"sk-a")]) is ACME
    assert clients.find([x_api_key(b"sk-b")]) is ACME
    assert clients.find([bearer(b"sk-a"), x_api_key(b"sk-b")]) is ACME
    # Its digest is not its key.
    assert clients.find([bearer(digest_of(b"sk-a").value)]) is None


@pytest.mark.parametrize(
    ("api_keys", "tenants", "headers", "expected"),
    [
        ((), [ACME], [], None),
        ((), [ACME], [bearer(b"sk-client")], None),
        ((), [ACME, WALK_IN], [], WALK_IN),
        ((), [ACME, WALK_IN], [bearer(b"sk-client")], None),
        ([KEY], [ACME, WALK_IN], [], None),
        ([KEY], [ACME, WALK_IN], [bearer(b"sk-client")], WALK_IN),
        ([KEY], [ACME, WALK_IN], [bearer(b"sk-a")], ACME),
        ([KEY], [ACME, WALK_IN], [bearer(b"sk-a"), x_api_key(b"sk-client")], None),
    ],
)
def test_the_default_tenant_has_the_keys_that_are_nobodys(
    api_keys: list[Secret],
    tenants: list[Tenant],
    headers: list[tuple[bytes, bytes]],
    expected: Tenant | None,
) -> None:
    assert Clients(api_keys, tenants).find(headers) is expected


def test_a_tenant_may_use_its_models_alone() -> None:
    assert refuse_model(ACME, "n") is None
    assert refuse_model(WALK_IN, "anything") is None
    assert refuse_model(ACME, "x" * 500) == (
        404,
        f"The model `{'x' * 128}` does not exist or you do not have access to it.",
    )
    # Else an engine would take the model that it has.
    assert refuse_model(ACME, "") == (400, "you must provide a model parameter")


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, b"0s"),
        (1, b"1ms"),
        (12_000_000, b"12ms"),
        (S, b"1s"),
        (8_640_000_000, b"8.64s"),
        (360 * S, b"6m0s"),
        (432_500_000_000, b"7m12.5s"),
        (3600 * S, b"1h0m0s"),
        (90_061 * S, b"25h1m1s"),
    ],
)
def test_times_are_written_as_openai_does(time_ns: int, text: bytes) -> None:
    assert duration(time_ns) == text


def test_each_rate_has_its_headers() -> None:
    assert allowance_headers({"tokens": Allowance(1000, 990, 20_000_000)}) == [
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"990"),
        (b"x-ratelimit-reset-tokens", b"20ms"),
    ]
    assert allowance_headers({}) == []


# The name of a conversation: which of those that clients send counts, and what is none.


CLAUDE = "x-claude-code-session-id"
UUID = "c31ac7cf-56a7-4c0a-b363-2b726377687d"


def body(**members: object) -> RequestBody:
    return RequestBody(json.dumps({"model": "tiny", **members}).encode())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([("x-session-id", "one")], b"one"),
        ([("x-session-id", "caf\u00e9 0")], b"caf\xc3\xa9 0"),
        # What Claude Code sends of its main thread, and of a subagent.
        ([("x-app", "cli"), (CLAUDE, UUID)], UUID.encode()),
        ([("x-claude-code-agent-id", "a7"), (CLAUDE, UUID)], UUID.encode() + b"\0a7"),
        ([("x-claude-code-agent-id", "a7")], b""),
        # OpenCode.
        ([("x-session-affinity", "ses_1"), ("x-session-id", "ses_1")], b"ses_1"),
        ([("x-session-affinity", "ses_1"), ("x-parent-session-id", "ses_0")], b"ses_1"),
        # Codex: two threads of one session have prompts of their own.
        ([("session-id", "s"), ("thread-id", "t")], b"t"),
        ([("session-id", "s")], b"s"),
        ([("session_id", "s"), ("conversation_id", "s")], b"s"),
        # The most explicit one, and the first of two.
        ([(CLAUDE, UUID), ("session-id", "s"), ("x-session-id", "own")], b"own"),
        ([("x-session-id", "first"), ("x-session-id", "second")], b"first"),
        # None.
        ([], b""),
        ([("x-request-id", "r"), ("x-session", "s"), ("session", "s")], b""),
        ([("x-session-id", ""), ("session-id", "s")], b"s"),
        ([("x-session-id", "x" * 1024)], b"x" * 1024),
        ([("x-session-id", "x" * 1025), ("session-id", "s")], b"s"),
    ],
)
def test_the_name_in_a_head(given: list[tuple[str, str]], name: bytes) -> None:
    assert named_in_head([(field.encode(), value.encode()) for field, value in given]) == name


OLD = f"user_{'ab' * 32}_account_{UUID}_session_{UUID}"
NEW = json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"metadata": {"user_id": OLD}}, UUID),
        ({"metadata": {"user_id": OLD.replace(f"account_{UUID}", "account_")}}, UUID),
        ({"metadata": {"user_id": NEW}}, UUID),
        ({"user": OLD}, UUID),
        ({"user": NEW, "prompt_cache_key": "key"}, UUID),
        ({"prompt_cache_key": "key", "metadata": {"user_id": "somebody"}, "user": "u"}, "key"),
        ({"prompt_cache_key": "\ud800"}, "\ud800"),
        ({"prompt_cache_key": "key", "session_id": "s"}, "s"),
        # A user has many conversations.
        ({"metadata": {"user_id": "somebody"}}, ""),
        ({"user": "user_session_"}, ""),
        ({"user": f"{OLD}/2"}, ""),
        ({"user": "_session_" + "a" * 129}, ""),
        # Whatever else a client may write there.
        ({"user": "{", "metadata": {"user_id": '{"session_id": 7}'}}, ""),
        ({"user": "{" * 900, "metadata": [OLD]}, ""),
        ({"user": '{"a":' * 150 + "1" + "}" * 150}, ""),
        ({"user": 7, "metadata": {"user_id": 7}, "prompt_cache_key": ["key"]}, ""),
        ({"user": None, "metadata": None, "prompt_cache_key": None}, ""),
        ({"prompt_cache_key": "x" * 1025}, ""),
        ({"metadata": {"user_id": OLD, "more": "x" * 1025}}, ""),
    ],
)
def test_the_name_in_a_body(members: dict[str, object], name: str) -> None:
    expected = name.encode("utf-8", "surrogatepass")
    assert named_in_body(body(**members)) == expected
    # Of a large body the members are decoded only when they are asked for.
    large = body(messages=[{"role": "user", "content": "x" * 200_000}], **members)
    assert named_in_body(large) == expected


def test_a_member_that_is_too_large_to_be_a_name_is_left_to_the_engine() -> None:
    large = body(prompt="a", metadata={"user_id": "x" * 200_000}, prompt_cache_key="y" * 200_000)
    assert named_in_body(large) == b""


def test_a_session_has_a_name_of_its_tenant_s() -> None:
    session = session_of(b"chat-1", "a")
    assert 0 < session < 2**63
    assert session == session_of(b"chat-1", "a")
    assert session not in {session_of(b"chat-1", "b"), session_of(b"c", "a")}
    assert session_of(b"", "a") == 0


# What the head of a request decides: what is rejected before its body is read, and whose key is right.


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


# What the head alone rules out.


async def answer_to_head(site: Site, head: bytes, port: int | None = None) -> tuple[int, bytes]:
    """Send a head whose body never comes; return the status and the rest of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port or site.world.port)
    begin_s = site.loop.time()
    writer.write(head + b"\r\n\r\n")
    answer = await reader.read()
    assert site.loop.time() - begin_s < 1.0
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer


LARGE = b"\r\nHost: a\r\nContent-Length: 1000000"


def test_a_hand_off_that_nobody_awaits_is_404_before_its_body() -> None:
    """Without a key, a large body for the metaserver stalled every connection."""

    async def scenario(site: Site) -> None:
        status, _ = await answer_to_head(site, b"POST /v1/metaserver/guess HTTP/1.1" + LARGE)
        assert status == 404

    play(scenario)
    play(scenario, connector="mooncake-layerwise")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/nothing HTTP/1.1" + LARGE, 404),
        (b"PUT /v1/completions HTTP/1.1" + LARGE, 405),
        (b"POST /metrics HTTP/1.1" + LARGE, 405),
        (b"POST /v1/completions HTTP/1.1" + LARGE, 401),
        (b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue" + LARGE, 401),
        (b"POST /tokenize HTTP/1.1" + LARGE, 401),
        (b"POST /tokenize HTTP/1.1\r\nAuthorization: Bearer right" + LARGE + b"0000", 413),
        (
            b"POST /tokenize HTTP/1.1\r\nAuthorization: Bearer right\r\n"
            b"Content-Encoding: gzip" + LARGE,
            415,
        ),
    ],
)
def test_what_the_head_rules_out_is_answered_before_the_body(
    tmp_path: Path, head: bytes, status: int
) -> None:
    """A client without a key could upload any number of bodies first."""

    async def scenario(site: Site) -> None:
        told, answer = await answer_to_head(site, head)
        assert told == status
        assert b'"error":{"message":' in answer
        assert b"100 Continue" not in answer

    flags = {"api_key_file": keys(tmp_path, "keys", "right"), "body_limit_bytes": 2_000_000}
    play(scenario, flags=flags)


@served()
async def test_a_large_order_is_refused_before_its_body(site: Site) -> None:
    assert site.world.proxy.admin is not None
    port = site.world.proxy.admin.port
    head = b"POST /admin/policy HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048577"
    status, answer = await answer_to_head(site, head, port)
    assert (status, b'"error":{' in answer) == (413, True)


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (b"content-type", b"application/json", 200),
        (b"content-type", b"Application/JSON; charset=utf-8", 200),
        (b"content-type", b"", 200),
        (b"content-type", b"application/x-www-form-urlencoded", 200),  # curl -d
        (b"content-type", b"text/plain", 415),
        (b"content-type", b"multipart/form-data; boundary=x", 415),
        (b"content-encoding", b"identity", 200),
        (b"content-encoding", b"gzip", 415),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@served()
async def test_a_body_is_json_and_not_encoded(
    site: Site, path: str, name: bytes, value: bytes, status: int
) -> None:
    """An encoded body was said to be no UTF-8."""
    answer = await site.post(path, BODY, [(name, value)])
    assert answer.status == status
    if status != 200:
        is_error(answer, status)
        assert site.seen == []
    assert (await site.post(path, BODY)).status == 200


# Keys.


def with_key(word: str) -> "Headers":
    return [(b"authorization", word.encode())]


@served(flags=lambda tmp_path: {"api_key_file": keys(tmp_path, "keys", "right1", "right2")})
async def test_a_client_needs_one_of_the_keys(site: Site, tmp_path: Path) -> None:
    """Anthropic's clients, whose key is in X-Api-Key, got 401."""
    refused: list[Headers] = [
        [],
        with_key("Bearer"),
        with_key("Bearer "),
        with_key("Bearer wrong"),
        with_key("Bearer right1x"),
        with_key("Bearer right1 right2"),
        with_key("Bearer right1,right2"),
        with_key("Basic right1"),
        with_key("right1"),
        with_key("Bearer right1") * 2,
        with_key("Bearer right1") + with_key("Bearer wrong"),
        [(b"x-api-key", b"wrong")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer right1")],
        [(b"x-api-key", b"right1")] * 2,
        [(b"api-key", b"wrong")],
        [(b"api-key", b"right1")] * 2,
        [(b"api-key", b"right1"), (b"x-api-key", b"wrong")],
        [(b"x-api-key", b"right1"), *with_key("Bearer wrong")],
        [(b"x-api-key", b"wrong"), *with_key("Bearer right1")],
    ]
    accepted = [
        with_key("Bearer right1"),
        with_key("bearer right1"),
        with_key("BEARER right2"),
        with_key("Bearer   right2"),
        [(b"x-api-key", b"right1")],
        [(b"x-api-key", b"right1"), *with_key("Bearer right2")],
        [(b"api-key", b"right1")],  # Azure's clients.
    ]
    for path, method in {COMPLETIONS: "POST", "/v1/models": "GET"}.items():
        for headers in refused:
            answer = await site.send(path, BODY, method=method, headers=headers).end()
            is_error(answer, 401)
            assert answer.header(b"www-authenticate") == b"Bearer"
    assert site.seen == []
    for headers in accepted:
        assert (await site.post(COMPLETIONS, BODY, headers)).status == 200
        assert (await site.get("/v1/models", headers)).status == 200
    assert len(site.seen) == 3 * len(accepted)
    for name in (b"authorization", b"api-key", b"x-api-key"):
        assert all(seen.header(name) is None for seen in site.seen)
    # Whoever asks whether the proxy lives has no key; loads and engines' names need one.
    for page in OWN:
        keyed = page in ("/load", "/metrics")
        assert (await site.get(page)).status == (401 if keyed else 200)
        assert (await site.get(page, with_key("Bearer right1"))).status == 200
    # Nobody without a key learns what there is.
    is_error(await site.get("/v1/completions"), 405)
    is_error(await site.get("/v1/nothing"), 404)


@served(flags=lambda tmp_path: {"engine_key_file": keys(tmp_path, "key", "engines")})
async def test_engines_get_their_own_key_and_never_the_clients(site: Site, tmp_path: Path) -> None:
    for headers in ([], with_key("Bearer mine")):
        assert (await site.post(COMPLETIONS, BODY, headers)).status == 200
        assert (await site.get("/v1/models", headers)).status == 200
    assert len(site.seen) == 6
    for seen in site.seen:
        given = [value for name, value in seen.request.headers if name == b"authorization"]
        assert given == [b"Bearer engines"]


def test_new_keys_are_used_from_the_next_request_on(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        given = with_key("Bearer first")
        assert (await site.post(COMPLETIONS, BODY, given)).status == 200
        site.world.proxy.gateway.use_keys(Clients((Secret(b"second"),)), Secret(b"newer"))
        assert (await site.post(COMPLETIONS, BODY, given)).status == 401
        assert (await site.post(COMPLETIONS, BODY, with_key("Bearer second"))).status == 200
        sent = [seen.header(b"authorization") for seen in site.seen]
        assert sent == [b"Bearer engines"] * 2 + [b"Bearer newer"] * 2

    flags = {
        "api_key_file": keys(tmp_path, "keys", "first"),
        "engine_key_file": keys(tmp_path, "key", "engines"),
    }
    play(scenario, flags=flags)


@served()
async def test_without_keys_the_clients_own_is_for_the_engines(site: Site) -> None:
    await site.post(COMPLETIONS, BODY, with_key("Bearer mine"))
    await site.get("/v1/models", with_key("Bearer mine"))
    assert [seen.header(b"authorization") for seen in site.seen] == [b"Bearer mine"] * 3
    site.seen.clear()
    await site.get("/v1/models", [(b"x-api-key", b"mine")])
    assert [seen.header(b"x-api-key") for seen in site.seen] == [b"mine"]


@served()
async def test_the_version_of_anthropics_api_reaches_the_engines(site: Site) -> None:
    headers = [(b"anthropic-version", b"2023-06-01"), (b"anthropic-beta", b"a,b")]
    await site.post(CHAT, TALK, headers)
    for name, value in headers:
        assert [seen.header(name) for seen in site.seen] == [value] * 2


@served(flags={"public_metrics": False})
async def test_metrics_can_be_kept_from_clients(site: Site) -> None:
    """Engines' addresses and loads were there for everybody."""
    is_error(await site.get("/metrics"), 404)
    assert (await site.admin("/metrics")).status == 200


@served()
async def test_the_page_of_metrics_is_rendered_at_most_once_a_second(site: Site) -> None:
    """256 readings a second took a whole core."""
    before = (await site.get("/metrics")).body
    await site.post(COMPLETIONS, BODY)
    assert (await site.admin("/metrics")).body == before
    await asyncio.sleep(1.0)
    assert (await site.get("/metrics")).body != before


# WebSockets.

OPENING = (
    b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: %b\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (b"/v1/responses", b"POST the same request"),
        (b"/v1/responses/?a=b", b"POST the same request"),
        (b"/v1/realtime?model=tiny", b"/v1/audio/transcriptions"),
    ],
)
@served()
async def test_a_websocket_is_426_with_what_is_served_instead(
    site: Site, path: bytes, words: bytes
) -> None:
    """Codex asks for one first, and goes over to POST at once if the answer is 426."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.world.port)
    for protocol in (b"websocket", b"h2c, WebSocket"):  # The connection stays.
        writer.write(OPENING % (path, protocol) + b"\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        assert head.startswith(b"HTTP/1.1 426 Upgrade Required\r\n")
        assert fields[b"upgrade"] == b"HTTP/1.1"
        assert fields[b"connection"] == b"upgrade"
        body = await reader.readexactly(int(fields[b"content-length"]))
        assert words in body
        assert b'"type":"UpgradeRequiredError"' in body
    _, closed = await answer_to_head(
        site, OPENING % (path, b"websocket") + b"\r\nContent-Length: 9"
    )
    assert b"upgrade: HTTP/1.1\r\nconnection: upgrade, close\r\n" in closed
    writer.close()
    ended = site.world.ended
    await site.until(lambda: [record.status for record in ended] == [426] * 3)
    assert site.seen == []


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (OPENING % (b"/v1/chat/completions", b"websocket"), 405),
        (OPENING % (b"/v1/responses/resp_1", b"websocket"), 404),
        (OPENING % (b"/v1/responses", b"h2c"), 405),
        (OPENING % (b"/v1/realtime", b"websockets"), 404),
        (OPENING.replace(b"GET", b"POST") % (b"/v1/realtime", b"websocket"), 404),
        (OPENING % (b"/health", b"websocket"), 200),
    ],
)
@served()
async def test_what_else_asks_for_an_upgrade_is_answered_as_without(
    site: Site, head: bytes, status: int
) -> None:
    told, answer = await answer_to_head(site, head + b"\r\nConnection: close")
    assert told == status
    assert b"upgrade:" not in answer


@served()
async def test_a_request_that_offers_an_upgrade_is_served_without_it(site: Site) -> None:
    body = b'{"model":"tiny","prompt":"a","max_tokens":2}'
    head = OPENING.replace(b"GET", b"POST") % (COMPLETIONS.encode(), b"websocket")
    head += b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.world.port)
    writer.write(head)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert {b"upgrade", b"connection"}.isdisjoint(
        name for seen in site.seen for name, _ in seen.request.headers
    )


@served(flags=lambda tmp_path: {"api_key_file": keys(tmp_path, "keys", "right")})
async def test_probes_have_the_names_of_other_routers_too(site: Site, tmp_path: Path) -> None:
    for ready in (True, False):
        site.world.plane.deployment.driver.draining = not ready
        for get in (site.get, site.admin):
            assert (await get("/liveness")).status == 200
            for path in ("/ready", "/readiness", "/healthcheck"):
                answer = await get(path)
                assert answer.status == (200 if ready else 503), path
                assert ready or b"not ready" in answer.body
