"""Requests of other sites' pages: what a browser is told before, and with every answer."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Exchanged, Site, play, served

if TYPE_CHECKING:
    from pathlib import Path

    from balanceroute.proxy.wire.messages import Headers

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 4, "ignore_eos": True}
PAGE = b"https://chat.example"
ALLOW = b"access-control-allow-origin"
EXPOSE = b"access-control-expose-headers"


def of(origin: bytes, *more: tuple[bytes, bytes]) -> "Headers":
    return [(b"origin", origin), *more]


def asking(origin: bytes) -> "Headers":
    return of(
        origin,
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization,content-type"),
    )


async def answers(site: Site, headers: "Headers") -> list[Exchanged]:
    """Ask for answers of every kind: whole, streamed, passed on, own, and errors of all layers."""
    return [
        await site.post(COMPLETIONS, BODY, headers),
        await site.post(COMPLETIONS, BODY | {"stream": True}, headers),
        await site.get("/v1/models", headers),
        await site.get("/health", headers),
        await site.post(COMPLETIONS, b"{", headers),
        await site.get("/v1/nothing", headers),
        await site.send("/v1/completions", method="OPTIONS", headers=headers).end(),
        await site.post(COMPLETIONS, bytes(2_000), headers),
    ]


STATUSES = [200, 200, 200, 200, 400, 404, 405, 413]
FLAGS = {"body_limit_bytes": 1_000}


@served(flags=FLAGS | {"cors_origin": "*"})
async def test_every_answer_lets_any_page_read_it_if_all_may(site: Site) -> None:
    """Web applications that worked with vLLM did not work here."""
    given = await answers(site, of(PAGE))
    assert [answer.status for answer in given] == STATUSES
    for answer in given:
        assert [value for name, value in answer.headers if name == ALLOW] == [b"*"]
        (exposed,) = [value for name, value in answer.headers if name == EXPOSE]
        assert exposed.startswith(b"*, ")
        assert b"X-Request-Id" in exposed
    for answer in await answers(site, []):
        assert answer.header(ALLOW) is None


def test_a_preflight_allows_what_was_asked_for(tmp_path: "Path") -> None:
    path = tmp_path / "keys"
    path.write_text("right\n")
    path.chmod(0o600)

    async def scenario(site: Site) -> None:
        for target in (COMPLETIONS, "/v1/models", "/v1/nothing"):
            answer = await site.send(target, method="OPTIONS", headers=asking(PAGE)).end()
            assert (answer.status, answer.body) == (200, b"OK")
            assert answer.header(ALLOW) == b"*"
            assert b"POST" in (answer.header(b"access-control-allow-methods") or b"")
            allowed = answer.header(b"access-control-allow-headers")
            assert allowed == b"authorization,content-type"
            assert answer.header(b"access-control-max-age") == b"600"
            assert answer.header(b"access-control-allow-credentials") is None
        assert (await site.post(COMPLETIONS, BODY, of(PAGE))).status == 401
        assert site.seen == []

    play(scenario, flags={"cors_origin": "*", "api_key_file": str(path)})


def test_only_the_listed_sites_may() -> None:
    async def scenario(site: Site) -> None:
        for answer in await answers(site, of(PAGE)):
            assert answer.header(ALLOW) == PAGE
            assert answer.header(b"vary") == b"Origin"
        answer = await site.send(COMPLETIONS, method="OPTIONS", headers=asking(PAGE)).end()
        assert (answer.status, answer.header(ALLOW)) == (200, PAGE)
        for other in (b"https://evil.example", b"http://chat.example", b"null", PAGE + b".evil"):
            assert {one.header(ALLOW) for one in await answers(site, of(other))} == {None}
            refused = await site.send(COMPLETIONS, method="OPTIONS", headers=asking(other)).end()
            assert (refused.status, refused.header(ALLOW)) == (400, None)

    origins = ["https://other.example", PAGE.decode()]
    play(scenario, flags=FLAGS | {"cors_origin": origins})


@pytest.mark.parametrize("headers", [of(PAGE), asking(PAGE)])
@served(flags=FLAGS)
async def test_without_the_setting_nothing_of_it_is_there(site: Site, headers: "Headers") -> None:
    given = await answers(site, headers)
    assert [answer.status for answer in given] == STATUSES
    for answer in given:
        assert not [name for name, _ in answer.headers if name.startswith(b"access-control")]


async def told(site: Site, head: bytes) -> tuple[int, bytes]:
    """Send bytes that are no readable request; return the status and the answer, in lower case."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.world.port)
    writer.write(head)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer.lower()


FIRST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
ORIGIN = b"ORIGIN: \t" + PAGE + b" \r\n"


@pytest.mark.parametrize("site_of", ["*", PAGE.decode()])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (FIRST + ORIGIN + b"X-Large: %b\r\n\r\n" % (b"x" * 40_000), 431),
        (FIRST + ORIGIN + b"X-Large: %b" % (b"x" * 40_000), 431),  # Whose end never comes.
        (FIRST + ORIGIN + b"X-Many: 1\r\n" * 101 + b"\r\n", 431),
        (FIRST + ORIGIN + b"Host: b\r\n\r\n", 400),
        (b"POST /%b HTTP/1.1\r\nHost: a\r\n" % (b"x" * 9_000) + ORIGIN + b"\r\n", 414),
        (b"BREW / HTTP/1.1\r\nHost: a\r\n" + ORIGIN + b"\r\n", 501),
        (FIRST + ORIGIN, 408),
    ],
)
@served(flags=lambda site_of: {"cors_origin": [site_of]})
async def test_a_page_may_read_why_its_head_was_not(
    site: Site, head: bytes, status: int, site_of: str
) -> None:
    code, answer = await told(site, head)
    assert code == status
    allowed = b"*" if site_of == "*" else PAGE
    assert answer.count(ALLOW + b": " + allowed + b"\r\n") == 1
    assert answer.count(EXPOSE) == 1
    # Another's head, and one of two pages, says nothing.
    for origin in (b"", ORIGIN + ORIGIN, b"X-Origin: " + PAGE + b"\r\n"):
        assert ALLOW not in (await told(site, head.replace(ORIGIN, origin)))[1]


@served(flags={"cors_origin": "*", "connection_limit": 1})
async def test_a_page_may_read_that_there_are_too_many_connections(site: Site) -> None:
    runs = site.send(COMPLETIONS, BODY | {"stream": True, "max_tokens": 50})
    await runs.until_events(1)
    code, answer = await told(site, FIRST + ORIGIN + b"\r\n")
    assert (code, answer.count(ALLOW + b": *")) == (503, 1)
    await runs.end()
