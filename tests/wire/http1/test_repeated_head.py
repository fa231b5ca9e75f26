"""What is not parsed again is read as if it were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.wire.http1.heads import RequestHead, parse_request_head
from balanceroute.proxy.wire.http1.incoming_request import RepeatedHead
from balanceroute.proxy.wire.messages import MalformedError

LIMITS = {"max_target_bytes": 100, "max_headers": 10}


def text(length: str, *, name: str = "Content-Length", more: str = "", path: str = "/v1") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{name}: {length}\r\nX-Id: 7\r\n{more}\r\n".encode()


def read(heads: RepeatedHead, head: bytes) -> RequestHead:
    return heads.parse(head, **LIMITS)


texts = st.builds(
    text,
    st.integers(0, 1200).map(str) | st.sampled_from(["007", "+5", "1 2", "9" * 18, "9" * 19, ""]),
    name=st.sampled_from(
        ["Content-Length", "content-length", "CONTENT-LENGTH", "X-Content-Length"]
    ),
    more=st.sampled_from(
        ["", "X-A: b\r\n", "Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"]
    ),
    path=st.sampled_from(["/v1", "/v2?Content-Length:1"]),
)


@given(st.lists(texts, max_size=8))
def test_every_head_is_read_as_if_it_were_the_first(drawn: list[bytes]) -> None:
    heads = RepeatedHead()
    for one in drawn:
        try:
            expected = parse_request_head(one, **LIMITS)
        except MalformedError as error:
            with pytest.raises(MalformedError, match=str(error)):
                read(heads, one)
        else:
            assert read(heads, one) == expected


def test_what_is_said_again_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = RepeatedHead()
    first = read(heads, text("12"))
    monkeypatch.setattr("balanceroute.proxy.wire.http1.incoming_request.parse_request_head", None)
    assert read(heads, text("12")) is first
    second = read(heads, text("345"))
    assert second.content_length == 345
    assert second.headers == [(b"host", b"a"), (b"content-length", b"345"), (b"x-id", b"7")]
    # What others may still look at stays as it was.
    assert first.content_length == 12
    assert (b"content-length", b"12") in first.headers


def test_a_long_head_is_not_kept() -> None:
    heads = RepeatedHead()
    long = text("12", more=f"X-A: {'b' * 4096}\r\n")
    first = read(heads, long)
    assert read(heads, long) == first
    assert read(heads, long) is not first


def test_a_head_that_is_refused_leaves_nothing_behind() -> None:
    heads = RepeatedHead()
    read(heads, text("12"))
    with pytest.raises(MalformedError):
        read(heads, text("12", more="Content-Length: 12\r\n"))
    assert read(heads, text("13")).content_length == 13


def test_what_is_learned_of_a_head_goes_on_while_it_is_repeated() -> None:
    heads = RepeatedHead()
    first = read(heads, text("12"))
    first.learned.facts = "whose it is"
    assert read(heads, text("12")).learned.facts == "whose it is"
    assert read(heads, text("345")).learned.facts == "whose it is"
    # Nothing of it is true of another.
    other = read(heads, text("345", more="Authorization: Bearer a\r\n"))
    assert other.learned.facts is None
    assert read(heads, text("345")).learned.facts is None
