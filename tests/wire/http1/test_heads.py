"""The heads' grammar: strict, and never more than llhttp accepts."""

import httptools
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from balanceroute.proxy.wire.http1.heads import (
    RequestHead,
    check_partial_head,
    encode_fields,
    encode_request_head,
    parse_request_head,
    parse_response_head,
)
from balanceroute.proxy.wire.messages import Headers, MalformedError, UnsafeHeaderError


def parse(head: bytes) -> RequestHead:
    return parse_request_head(head, max_target_bytes=100, max_headers=10)


class _Llhttp:
    def __init__(self) -> None:
        self.target = b""
        self.headers: Headers = []
        self.complete = False
        self.keep_alive = False
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True
        self.keep_alive = self.parser.should_keep_alive()


def test_a_request_head_is_read() -> None:
    head = parse(
        b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: a:8000\r\nX-Trace:  one two\t\r\n"
        b"EMPTY:\r\nContent-Length: 12\r\nX-Latin: \xe9\r\n\r\n"
    )
    assert (head.method, head.path, head.query) == (b"POST", b"/v1/chat/completions", b"x=1")
    assert head.headers == [
        (b"host", b"a:8000"),
        (b"x-trace", b"one two"),
        (b"empty", b""),
        (b"content-length", b"12"),
        (b"x-latin", b"\xe9"),
    ]
    assert head.content_length == 12
    assert head.keep_alive
    assert not head.chunked
    assert not head.http_1_0
    assert not head.expects_continue


@pytest.mark.parametrize(
    ("version", "value", "keeps"),
    [
        (b"1.1", None, True),
        (b"1.1", b"close", False),
        (b"1.1", b"Upgrade, Close", False),
        (b"1.1", b"keep-alive, Upgrade", True),
        (b"1.0", None, False),
        (b"1.0", b"Keep-Alive", True),
        (b"1.0", b"keep-alive, close", False),
    ],
)
def test_the_connection_header_decides_reuse(
    version: bytes, value: bytes | None, *, keeps: bool
) -> None:
    line = b"" if value is None else b"Connection: %b\r\n" % value
    head = parse(b"GET / HTTP/%b\r\nHost: a\r\n%b\r\n" % (version, line))
    assert head.keep_alive is keeps


def mostly(usual: bytes, *others: bytes) -> st.SearchStrategy[bytes]:
    """Draw the usual value nine times of ten, so that most heads have one fault or none."""
    return st.sampled_from([usual] * (9 * len(others)) + list(others))


fields = st.lists(
    mostly(
        b"X: y",
        b"Content-Length: 5",
        b"Content-Length: 05",
        b"Content-Length: 5, 5",
        b"Content-Length: +5",
        b"Content-Length:",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked ",
        b"Transfer-Encoding:\tchunked",
        b"Transfer-Encoding: chunked\t",
        b"Transfer-Encoding: Chunked \t ",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Content-Length: 5\t",
        b"Connection: close",
        b"X : y",
        b" folded",
        b"X:\tv\t",
        b"X: a\0b",
        b"X: \x7f",
        b"X: a\rb",
        b"\xe9: y",
        b": y",
        b"no colon",
        b"Host: b",
        b"Expect: 100-continue",
        b"Upgrade: websocket",
    ),
    max_size=5,
)


@settings(max_examples=300)
@given(
    mostly(b"POST", b"GET", b"get", b"G(T", b""),
    mostly(b"/", b"/a?b", b"*", b"http://a/", b"a:80", b"/ /", b"/\x80", b"/#f", b""),
    mostly(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1 ", b"http/1.1", b""),
    fields,
    st.lists(mostly(b"\r\n", b"\n", b"\r", b"\r\r\n"), min_size=8, max_size=8),
)
def test_what_is_accepted_llhttp_reads_alike(
    method: bytes, target: bytes, version: bytes, lines: list[bytes], ends: list[bytes]
) -> None:
    rows = [method + b" " + target + b" " + version, b"Host: a", *lines, b""]
    raw = b"".join(row + end for row, end in zip(rows, ends, strict=False))
    try:
        head = parse(raw)
    except MalformedError:
        event("refused")
        return
    event("accepted")
    if head.method == b"get":  # A valid token that llhttp does not know.
        return
    seen = _Llhttp()
    parser = seen.parser
    parser.feed_data(raw)
    assert seen.complete
    assert parser.get_method() == head.method
    target = seen.target.removeprefix(b"http://a")
    assert target.partition(b"?")[::2] == (head.path, head.query)
    assert sorted(seen.headers) == sorted(head.headers)
    assert parser.get_http_version() == ("1.0" if head.http_1_0 else "1.1")
    assert seen.keep_alive == head.keep_alive


def test_a_response_head_is_read() -> None:
    head = parse_response_head(
        b"HTTP/1.1 200 OK\r\ndate: now\r\nTransfer-Encoding: Chunked\r\n\r\n"
    )
    assert (head.status, head.chunked, head.content_length) == (200, True, None)
    assert head.headers == [(b"date", b"now"), (b"transfer-encoding", b"Chunked")]
    assert parse_response_head(b"HTTP/1.1 404\r\n\r\n").status == 404
    assert parse_response_head(b"HTTP/1.1 404 \r\n\r\n").status == 404
    assert not parse_response_head(b"HTTP/1.0 200 OK\r\n\r\n").keep_alive


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\n\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\r\n c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\nc: d\r\n\r\n",
        b"HTTP/1.1 200 O\0K\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\t\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_an_ambiguous_response_head_is_refused(head: bytes) -> None:
    with pytest.raises(MalformedError):
        parse_response_head(head)


@pytest.mark.parametrize("after", [b"\t", b" \t", b"\t "])
def test_a_tab_behind_the_transfer_coding_is_refused_as_by_llhttp(after: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked%b\r\n\r\n" % after
    with pytest.raises(httptools.HttpParserError):
        httptools.HttpRequestParser(object()).feed_data(head)
    with pytest.raises(MalformedError, match="a tab follows the transfer coding"):
        parse_request_head(head, max_target_bytes=100, max_headers=10)


@pytest.mark.parametrize(
    "start", [b"\n", b"GET / HTTP/1.1\n", b"a\rb", b"\x16", b"GET / HTTP/1.1\r\na: \0"]
)
def test_the_start_of_a_hopeless_head_is_refused_at_once(start: bytes) -> None:
    with pytest.raises(MalformedError):
        check_partial_head(start, 0)
    for size in range(1, len(start)):
        check_partial_head(start[:size], size - 1)
    with pytest.raises(MalformedError):
        check_partial_head(start, len(start) - 1)


def test_the_start_of_a_good_head_passes_at_every_length() -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\nX: \xe9\t~\r\n\r\n"
    for size in range(len(head)):
        check_partial_head(head[:size], max(0, size - 1))
        check_partial_head(head[:size], 0)


@pytest.mark.parametrize(
    "field",
    [
        (b"x", b"a\r\nset-cookie: b"),
        (b"x", b"a\nb"),
        (b"x", b"a\rb"),
        (b"x", b"\0"),
        (b"x\r\ny", b"a"),
        (b"x:y", b"a\r\n"),
        (b"x y", b"a"),
        (b"", b"a"),
    ],
)
def test_a_header_that_could_end_its_line_is_never_written(field: tuple[bytes, bytes]) -> None:
    with pytest.raises(UnsafeHeaderError):
        encode_fields([(b"before", b"ok"), field, (b"after", b"ok")])


def test_the_headers_that_frame_a_message_are_the_writers_own() -> None:
    headers = [
        (b"x", b"1"),
        (b"connection", b"upgrade"),
        (b"content-length", b"99"),
        (b"transfer-encoding", b"gzip"),
        (b"x", b"2"),
    ]
    assert encode_fields(headers) == b"x: 1\r\nx: 2\r\n"


@pytest.mark.parametrize(
    ("method", "target", "host"),
    [
        (b"GET", b"/ HTTP/1.1\r\nx: y", b"a"),
        (b"GET", b"/a b", b"a"),
        (b"GET", b"", b"a"),
        (b"G T", b"/", b"a"),
    ],
)
def test_a_request_line_that_is_more_than_one_is_never_written(
    method: bytes, target: bytes, host: bytes
) -> None:
    with pytest.raises(UnsafeHeaderError):
        encode_request_head(method, target, host, [], b"")


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [(b"GET", b"", None), (b"POST", b"", b"0"), (b"POST", b"abc", b"3"), (b"DELETE", b"x", b"1")],
)
def test_a_request_says_the_length_of_its_body(
    method: bytes, body: bytes, length: bytes | None
) -> None:
    head = encode_request_head(method, b"/x", b"a:1", [(b"x", b"y")], body)
    line = b"" if length is None else b"content-length: %b\r\n" % length
    assert head == method + b" /x HTTP/1.1\r\nhost: a:1\r\nx: y\r\n" + line + b"\r\n"
