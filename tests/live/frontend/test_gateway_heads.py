"""What the head of a request decides: what is rejected before its body is read, and whose key is right."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.frontend.gateway_requests import BODY, OWN, TALK, is_error, keys
from tests.support.site import Site, play, served

from balanceroute.proxy.live.frontend.request_head import Clients
from balanceroute.proxy.live.security import Secret

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

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
    head = b"POST /admin/policy HTTP/1.1\r\nHost: localhost\r\nContent-Length: 65537"
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
            for path in ("/ready", "/readiness"):
                answer = await get(path)
                assert answer.status == (200 if ready else 503), path
                assert ready or b"not ready" in answer.body
