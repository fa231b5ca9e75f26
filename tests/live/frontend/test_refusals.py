"""Refused requests: each is answered with an id, counted and logged, but a flood is not written down."""

import asyncio
import json
import logging
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.site import Site, play, served

from balanceroute.proxy.live.frontend.refusals import BURST, PER_S, outcome_of
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.live.telemetry.request_log import line_of

if TYPE_CHECKING:
    from pathlib import Path


COMPLETIONS = "/v1/completions"
KEY = "sk-secret"
# The first 8 hexadecimal digits of the SHA-256 of KEY.
KEY_ID = "746b4ad1"
BODY = {"model": "tiny", "prompt": "t1", "max_tokens": 2, "ignore_eos": True}


def key_file(folder: "Path") -> str:
    path = folder / "keys"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return str(path)


async def counted(site: Site) -> dict[tuple[str, str, str], float]:
    """Return the requests counted, by endpoint, outcome and status."""
    page = (await site.get("/metrics", [(b"x-api-key", KEY.encode())])).body.decode()
    found: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "balanceroute_requests_total":
                labels = sample.labels
                key = labels["endpoint"], labels["outcome"], labels["status"]
                found[key] = found.get(key, 0) + sample.value
    return found


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "label"),
    [
        ("POST", COMPLETIONS, [], 401, COMPLETIONS),
        ("GET", COMPLETIONS, [], 405, COMPLETIONS),
        ("GET", "/nothing/here", [], 404, "other"),
        ("GET", "/v1/responses/resp_1", [], 404, "other"),
        ("POST", COMPLETIONS, [(b"content-type", b"image/png")], 415, COMPLETIONS),
        ("POST", COMPLETIONS, [(b"x-expected-output-tokens", b"no")], 400, COMPLETIONS),
    ],
)
def test_what_the_gateway_refuses_is_answered_with_an_id_counted_and_logged(
    tmp_path: "Path",
    method: str,
    path: str,
    headers: list[tuple[bytes, bytes]],
    status: int,
    label: str,
) -> None:
    """None of these left a line or a count, or had an id."""
    if status != 401:
        headers = [*headers, (b"authorization", f"Bearer {KEY}".encode())]

    async def scenario(site: Site) -> None:
        agent = (b"user-agent", b"x" * 1000)
        refused = await site.send(path, BODY, method=method, headers=[*headers, agent]).end()
        assert refused.status == status
        (record,) = site.world.ended
        assert refused.header(b"x-request-id") == record.request_id.encode()
        assert (record.endpoint, record.status) == (path, status)
        assert record.outcome is Outcome.CLIENT_ERROR
        assert record.reason == refused.json["error"]["message"]
        assert record.peer.startswith("127.0.0.1:")
        assert record.user_agent == "x" * 128
        assert await counted(site) == {(label, "client_error", str(status)): 1}
        assert KEY not in line_of(record).decode()
        assert site.seen == []

    play(scenario, flags={"api_key_file": key_file(tmp_path)})


@pytest.mark.parametrize(
    ("sent", "status", "endpoint"),
    [
        (b"GET / HTTP/2.0\r\n\r\n", 505, ""),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00", 400, ""),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: much\r\n\r\n", 417, ""),
        (b"GET /" + b"x" * 10_000, 414, ""),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431, ""),
        (b"GET /health HTTP/1.1\r\nhos", 408, ""),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999\r\n\r\n",
            413,
            COMPLETIONS,
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{",
            408,
            COMPLETIONS,
        ),
    ],
)
@served()
async def test_what_the_server_refuses_is_counted_and_logged_too(
    site: Site, sent: bytes, status: int, endpoint: str
) -> None:
    """The gateway never saw these, and nothing was noted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.world.port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    (record,) = site.world.ended
    assert b"x-request-id: " + record.request_id.encode() in head
    assert (record.status, record.endpoint) == (status, endpoint)
    assert record.outcome is Outcome.CLIENT_ERROR
    assert record.reason == json.loads(body)["error"]["message"]
    assert record.peer.startswith("127.0.0.1:")
    assert await counted(site) == {(endpoint or "other", "client_error", str(status)): 1}


def test_a_flood_of_refused_requests_is_counted_but_not_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(site: Site) -> None:
        for _ in range(BURST + 50):
            await site.get("/nothing")
        written = len(site.world.ended)
        left_out = BURST + 50 - written
        assert left_out > 0
        assert await counted(site) == {("other", "client_error", "404"): BURST + 50}
        await asyncio.sleep(61.0)
        (line,) = [entry for entry in caplog.records if "left out" in entry.getMessage()]
        assert line.levelno == logging.WARNING
        assert vars(line)["fields"] == {"count": left_out}
        # The limit is a rate: time makes room again.
        await site.get("/nothing")
        assert len(site.world.ended) == written + 1

    play(scenario)
    assert BURST + PER_S < 1000


def test_the_rest_of_a_flood_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site) -> None:
        for _ in range(BURST + 50):
            await site.get("/nothing")

    play(scenario)
    assert [entry for entry in caplog.records if "left out" in entry.getMessage()]


@served(flags=lambda tmp_path: {"api_key_file": key_file(tmp_path)})
async def test_a_request_says_who_it_was(site: Site, tmp_path: "Path") -> None:
    """The log did not tell one client from another."""
    headers = [(b"authorization", f"bearer {KEY}".encode()), (b"user-agent", b"curl/8.5.0")]
    assert (await site.post(COMPLETIONS, BODY, headers)).status == 200
    (record,) = site.world.ended
    assert record.peer.startswith("127.0.0.1:")
    assert (record.api_key_id, record.user_agent) == (KEY_ID, "curl/8.5.0")


@served()
async def test_a_key_that_is_not_the_proxys_is_not_logged(site: Site) -> None:
    await site.post(COMPLETIONS, BODY, [(b"authorization", b"Bearer sk-engines")])
    (record,) = site.world.ended
    assert record.api_key_id == ""


@served()
async def test_the_secret_path_of_a_hand_off_is_not_logged(site: Site) -> None:
    await site.post("/v1/metaserver/secret", {})
    (record,) = site.world.ended
    assert record.endpoint == "/v1/metaserver/"


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/ping", "/load"])
@served()
async def test_the_proxys_own_pages_have_a_request_id_and_are_not_logged(
    site: Site, path: str
) -> None:
    assert (await site.get(path)).header(b"x-request-id")
    assert site.world.ended == []


@served(flags=lambda tmp_path: {"api_key_file": key_file(tmp_path)})
async def test_a_refusal_of_the_messages_api_has_anthropics_shape(
    site: Site, tmp_path: "Path"
) -> None:
    """Anthropic's clients read the kind of an error from its own shape."""
    refused = await site.post("/v1/messages", {})
    assert refused.status == 401
    assert refused.json["type"] == "error"
    assert refused.json["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (404, Outcome.CLIENT_ERROR),
        (501, Outcome.CLIENT_ERROR),
        (505, Outcome.CLIENT_ERROR),
        (429, Outcome.REJECTED),
        (503, Outcome.REJECTED),
        (500, Outcome.INTERNAL_ERROR),
    ],
)
def test_the_outcome_says_whose_fault_it_was(status: int, outcome: Outcome) -> None:
    assert outcome_of(status) is outcome


@pytest.mark.parametrize(
    ("path", "headers", "size", "words"),
    [
        (
            COMPLETIONS,
            [],
            1_001,
            "the request's body is larger than 1000 bytes (--body-limit-bytes)",
        ),
        ("/" + "x" * 100, [], 1, "the request target is too long (--target-limit-bytes)"),
        (
            COMPLETIONS,
            [(b"x-large", b"x" * 600)],
            1,
            "the request's head is too long (--header-limit-bytes, --header-limit)",
        ),
    ],
)
def test_a_refusal_for_a_size_names_what_sets_it(
    path: str, headers: list[tuple[bytes, bytes]], size: int, words: str
) -> None:
    async def scenario(site: Site) -> None:
        refused = await site.post(path, b"0" * size, headers)
        assert refused.json["error"]["message"] == words
        assert [record.reason for record in site.world.ended] == [words]

    limits = {"body_limit_bytes": 1_000, "target_limit_bytes": 64, "header_limit_bytes": 512}
    play(scenario, flags=limits)
