"""Long JSON strings that are looked at, not decoded: the same verdict as `json`, or none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.live.openai.json_scan import find_quote, plain_characters

LONG = b"text " * 2_500
ESCAPES = (b'\\"', b"\\n", b"\\/", b"\\\\", b"\\u00e9", b"\\x", b"\\")
BYTES = (
    b"t",
    b" word",
    b"\n",
    b"\x7f",
    b"\xc3\xa9",
    b"\xc3",
    b"\xf0\x9f\x98\x80",
    b"\xed\xa0\x80",
    LONG,
)
PIECES = st.sampled_from([*ESCAPES, *BYTES])


@given(st.lists(PIECES, max_size=30))
def test_a_string_has_the_characters_that_json_reads_or_is_left_to_json(
    pieces: list[bytes],
) -> None:
    content = LONG + b"".join(pieces)
    data = b'"' + content + b'"'
    characters = plain_characters(data, 1, 1 + len(content))
    try:
        expected = len(json.loads(data))
    except ValueError:
        assert characters is None
    else:
        assert characters in (None, expected)


@pytest.mark.parametrize("text", ["plain", 'He said: "well",\n and\tso \\ on', "Größe", "中文"])
def test_ordinary_text_is_not_left_to_json(text: str) -> None:
    text = text.replace("\\", "/") * 600
    data = json.dumps(text, ensure_ascii=False).encode()
    assert plain_characters(data, 1, len(data) - 1) == len(text)


def test_a_short_piece_is_left_to_json() -> None:
    assert plain_characters(b'"short"', 1, 6) is None


@given(st.lists(st.sampled_from([b'"', b"\\", b"t" * 700, b'\\"' * 700]), max_size=12))
def test_the_quote_found_is_the_first_without_a_backslash(pieces: list[bytes]) -> None:
    data = b"".join(pieces) + b"end"
    for begin in (0, min(1, len(data))):
        places = (i for i in range(begin, len(data)) if data[i] == ord('"'))
        expected = next((i for i in places if i == begin or data[i - 1] != ord("\\")), -1)
        assert find_quote(data, begin, len(data)) == expected
