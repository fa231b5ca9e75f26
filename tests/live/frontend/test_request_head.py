"""The head of a client's request: who it is from, and the little of it that reaches an engine."""

import pytest

from balanceroute.proxy.live.frontend.request_head import (
    client_request_id,
    engine_lines,
    key_headers,
    passed_headers,
    trace_headers,
)
from balanceroute.proxy.live.security import Secret
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
