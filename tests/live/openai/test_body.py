"""The client's body: what is refused, and that nothing else of it ever changes."""

import json
import sys
import tracemalloc
from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.site import transcript

from balanceroute.proxy.live.openai import json_scan
from balanceroute.proxy.live.openai.body import (
    SMALL_BYTES,
    BodyError,
    RequestBody,
    is_deep,
    may_be_deep,
    read_in_slices,
)
from balanceroute.proxy.live.openai.json_scan import MAX_LEVELS, JsonScanner, ScanError, summarise
from balanceroute.proxy.wire.messages import Pieces

spaces = st.text(" \t\n\r", max_size=2)
numbers = st.sampled_from(
    ["0", "-0", "7", "1E-7", "0.10", "-1.5e+3", "1e400", "123456789012345678901234567890"]
)


@st.composite
def string_texts(draw: st.DrawFn) -> str:
    """Draw a JSON string, each of its characters written in one of the ways there are."""
    text = '"'
    for character in draw(st.text(max_size=6)):
        plain = json.dumps(character, ensure_ascii=False)[1:-1]
        escaped = "".join(
            f"\\u{unit:04X}"
            for unit in memoryview(character.encode("utf-16-le", "surrogatepass")).cast("H")
        )
        text += draw(st.sampled_from([plain, escaped]))
    return text + '"'


def containers(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Draw arrays and objects; their keys may stand twice, which only the top level refuses."""
    pairs = st.tuples(string_texts(), spaces, texts).map(lambda pair: "{}:{}{}".format(*pair))
    return st.one_of(
        st.lists(texts, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.lists(pairs, max_size=3).map(lambda items: "{" + " ,".join(items) + "\n}"),
    )


value_texts = st.recursive(
    st.one_of(st.sampled_from(["null", "true", "false"]), numbers, string_texts()),
    containers,
    max_leaves=6,
)


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """Draw the text of an object without duplicates, and the text of each member by its key."""
    members: dict[str, str] = {}
    for key in draw(st.lists(string_texts(), max_size=5, unique_by=json.loads)):
        colon = f"{draw(spaces)}:{draw(spaces)}"
        members[json.loads(key)] = key + colon + draw(value_texts)
    inner = f"{draw(spaces)},{draw(spaces)}".join(members.values())
    text = f"{draw(spaces)}{{{draw(spaces)}{inner}{draw(spaces)}}}{draw(spaces)}"
    return text, members


def refused(data: bytes) -> str:
    with pytest.raises(BodyError) as caught:
        RequestBody(data)
    return str(caught.value)


@given(objects())
def test_every_member_that_is_not_overridden_keeps_its_text(
    drawn: tuple[str, dict[str, str]],
) -> None:
    text, members = drawn
    body = RequestBody(text.encode())
    assert body.encode({}) == ("{" + ", ".join(members.values()) + "}").encode()
    assert body.values == json.loads(text)
    assert list(body.values) == list(members)
    for key, member in members.items():
        assert bytes(body.member(key)) == member.encode()


@given(objects(), st.dictionaries(st.text(max_size=3), st.integers(), max_size=3), st.data())
def test_what_is_kept_keeps_its_order_and_the_overrides_come_last(
    drawn: tuple[str, dict[str, str]], new: dict[str, int], data: st.DataObject
) -> None:
    text, members = drawn
    chosen = st.sets(st.sampled_from(sorted(members))) if members else st.just(set[str]())
    overrides = new | dict.fromkeys(data.draw(chosen), 0)
    drop = data.draw(chosen)
    encoded = bytes(RequestBody(text.encode()).encode(overrides, drop=drop))
    kept = {
        key: member for key, member in members.items() if key not in overrides and key not in drop
    }
    assert all(member.encode() in encoded for member in kept.values())
    assert json.loads(encoded) == {key: json.loads(text)[key] for key in kept} | overrides
    assert list(json.loads(encoded)) == [*kept, *overrides]


@given(objects(), st.data())
@example(('{"a": 1}', {}), None)
def test_damaged_bytes_are_refused_or_are_json_after_all(
    drawn: tuple[str, dict[str, str]], data: st.DataObject | None
) -> None:
    damaged = bytearray(drawn[0].encode())
    if data is not None:
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(damaged)))
            damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        body = RequestBody(bytes(damaged))
    except BodyError:
        with pytest.raises(ValueError):  # noqa: PT011 - whatever the strict reading says.
            strictly_read(bytes(damaged))
    else:
        assert body.values == strictly_read(bytes(damaged))


def strictly_read(data: bytes) -> dict[str, Any]:
    """Read an object as the standard library does, less what it takes beyond RFC 8259."""

    def no_constant(name: str) -> object:
        raise ValueError(name)

    def once(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return pairs

    pairs = json.loads(data.decode(), parse_constant=no_constant, object_pairs_hook=once)
    if not data.decode().lstrip(" \t\n\r").startswith("{"):
        raise ValueError("no object")
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    result = json.loads(data.decode(), parse_constant=no_constant)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "[1, 2]",
        "null",
        '"a"',
        "7",
        "{",
        '{"a"',
        '{"a":',
        '{"a": 1',
        '{"a": 1,',
        '{"a": 1,}',
        "{,}",
        "{a: 1}",
        "{'a': 1}",
        '{"a" 1}',
        '{"a": 01}',
        '{"a": .5}',
        '{"a": +1}',
        '{"a": 1} x',
        '{"a": 1}{}',
        '{"a": "\n"}',
        '{"a\n": 1}',
        '{"\\x": 1}',
        '{"\\ud8": 1}',
        '{"a": 1}\0',
        '{"a":\xa01}',
        '{"a": 1 /* no */}',
    ],
)
def test_what_is_no_json_object_is_refused(text: str) -> None:
    assert refused(text.encode())


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("form", ['{"a": %s}', '{"a": [{"b": %s}]}'])
def test_numbers_that_json_does_not_have_are_refused(constant: str, form: str) -> None:
    assert constant in refused((form % constant).encode())


def test_a_body_that_is_not_utf_8_is_refused() -> None:
    assert refused(b'{"a": "\xff"}') == "the body is not UTF-8: byte 7"
    assert refused('{"a": 1}'.encode("utf-16"))


@pytest.mark.parametrize(
    "text",
    [
        '{"max_tokens": 1, "max_tokens": 2}',
        '{"max_tokens": 1, "n": 2, "max_tokens": 1}',
        '{"max_tokens": 1, "max\\u005ftokens": 2}',
        '{"kv_transfer_params": {"remote_host": "evil"}, "kv_transfer_params": null}',
    ],
)
def test_a_key_that_stands_twice_is_refused_however_it_is_written(text: str) -> None:
    with pytest.raises(BodyError, match="twice") as caught:
        RequestBody(text.encode())
    assert caught.value.param in ("max_tokens", "kv_transfer_params")


def test_a_long_key_is_not_told_whole() -> None:
    key = b'"' + b"k" * 10_000 + b'": 1'
    assert len(refused(b"{" + key + b", " + key + b"}")) < 200


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_without_end_is_refused(opening: bytes) -> None:
    assert refused(b'{"a": ' + opening * 100_000) == "the body is nested too deeply"


@pytest.mark.parametrize("kinds", [["[]"], ['{"a":}'], ["[]", '{"a":}']], ids="".join)
def test_a_small_body_may_have_as_many_levels_as_a_large_one(kinds: list[str]) -> None:
    def nested(levels: int) -> bytes:
        inside = [*islice(cycle(kinds), levels - 1)]
        opening, closing = (one[:-1] for one in inside), (one[-1] for one in reversed(inside))
        return f'{{"a": {"".join(opening)}1{"".join(closing)}, "b": []}}'.encode()

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(5_000)  # So that Python 3.11 parses more, as later versions do.
    try:
        RequestBody(nested(MAX_LEVELS))
        assert refused(nested(MAX_LEVELS + 1)) == "the body is nested too deeply"
    finally:
        sys.setrecursionlimit(before)


def test_an_integer_of_thousands_of_digits_is_refused() -> None:
    assert "digits" in refused(b'{"seed": ' + b"9" * 5_000 + b"}")


def test_a_lone_surrogate_goes_through_as_it_was_escaped() -> None:
    text = b'{"prompt": "\\ud800", "\\udfff": 1}'
    body = RequestBody(text)
    assert body.encode({}) == text
    assert json.loads(bytes(body.encode({"prompt": body.values["prompt"]}))) == json.loads(text)


def test_a_text_in_other_scripts_keeps_its_bytes() -> None:
    text = '{"prompt": "数据\u202e 🦙", "ключ": 1E-7}'.encode()
    assert RequestBody(text).encode({}) == text


@pytest.mark.parametrize("text", [b"{}", b" {\n} ", b'{"a": {}}'])
def test_an_empty_object_is_an_object(text: bytes) -> None:
    encoded = bytes(RequestBody(text).encode({"b": None}, drop={"a"}))
    assert json.loads(encoded) == {"b": None}


@pytest.mark.parametrize(
    "name",
    ["nixl_chat_stream_usage_decode.req", "mooncake_cmpl_stream_logprobs_decode.req"],
)
def test_a_real_body_goes_through_byte_for_byte(name: str) -> None:
    assert RequestBody(transcript(name)).encode({}) == transcript(name)


def test_what_may_be_encoded_again_is_told_from_what_may_not() -> None:
    deep: object = 1
    for _ in range(200):
        deep = [{"a": deep}]
    assert is_deep(deep)
    assert is_deep({"a": [1, deep]})
    assert may_be_deep(json.dumps(deep).encode())
    flat: list[object] = [None, 7, "a" * 500, [[]] * 500, {"a": {"b": [1, 2, {"c": []}]}}]
    assert not any(is_deep(value) for value in flat)
    assert not may_be_deep(json.dumps([{"a": {"b": [1, 2, {"c": []}]}}] * 10).encode())


@given(st.integers(0, 130), st.booleans())
def test_no_deep_value_has_few_brackets(levels: int, objects: bool) -> None:
    value: object = 1
    for _ in range(levels):
        value = {"a": value} if objects else [value]
    assert may_be_deep(json.dumps(value).encode()) == is_deep(value)


# Large bodies, which are scanned in slices.


@pytest.fixture(autouse=True)
def _narrow_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that short texts are read in pieces too.
    monkeypatch.setattr(json_scan, "_STRING_WINDOW", 16)
    monkeypatch.setattr(json_scan, "_SPACES_WINDOW", 16)
    monkeypatch.setattr(json_scan, "_NUMBERS_WINDOW", 24)


def scanned(data: bytes) -> RequestBody:
    """Read a body as if it were large, a step at a time."""
    scan = JsonScanner(data, {"messages", "prompt"})
    while not scan.advance(1):
        pass
    return RequestBody(data, scan)


long_texts = st.builds(
    lambda texts, times: '"' + "".join(texts)[:40].replace('"', "") * times + '"',
    st.lists(
        st.sampled_from(["a", "é", "数", "🦙", "\\n", "\\\\", "\\ud83d", "\\udD99", "\\u0041", " "])
    ),
    st.integers(0, 8),
)
rows = st.lists(numbers | st.sampled_from(["null", "1.5", "17"]), min_size=1, max_size=40)
many_texts = st.one_of(long_texts, rows.map(lambda row: f"[{', '.join(row)}]"), value_texts)


@given(objects())
def test_a_large_body_is_read_like_a_small_one(drawn: tuple[str, dict[str, str]]) -> None:
    data = drawn[0].encode()
    small, large = RequestBody(data), scanned(data)
    assert large.encode({"new": 1}) == small.encode({"new": 1})
    assert list(large.values) == list(small.values)
    assert dict(large.values) == small.values
    for key in small.values:
        assert large.member(key) == small.member(key)
        assert large.is_given(key) == (small.values[key] is not None)


@given(many_texts, spaces)
def test_long_values_are_read_in_pieces(value: str, space: str) -> None:
    data = f'{{"a": {value}{space}, "b":{space}[{value}]}}'.encode()
    try:
        expected = json.loads(data)
    except ValueError:
        with pytest.raises(ScanError):
            scanned(data)
    else:
        assert dict(scanned(data).values) == expected


@given(objects() | many_texts.map(lambda text: (f'{{"a": {text}}}', {})), st.data())
def test_damaged_bytes_of_a_large_body_are_refused_as_json_refuses_them(
    drawn: tuple[str, dict[str, str]], data: st.DataObject
) -> None:
    damaged = bytearray(drawn[0].encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        odd = st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"-", b"0", b"e."])
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(odd | st.binary(max_size=2))
    try:
        expected = strictly_read(bytes(damaged))
    except ValueError:
        with pytest.raises(ScanError):
            scanned(bytes(damaged))
    else:
        assert dict(scanned(bytes(damaged)).values) == expected


def unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object; of a key that stands twice it would have one value, and a summary counts both."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


@given(st.recursive(many_texts, containers, max_leaves=20))
def test_a_summary_counts_as_one_of_the_decoded_value(value: str) -> None:
    data = f'{{"prompt": {value}, "other": {value}}}'.encode()
    try:
        decoded = json.loads(value, object_pairs_hook=unrepeated)
    except ValueError:
        return
    found = scanned(data).summary("prompt")
    expected = summarise(decoded)
    counts = ("characters", "elements", "texts", "arrays", "objects", "inner")
    assert [getattr(found, name) for name in counts] == [getattr(expected, name) for name in counts]
    assert (found.integers == found.elements) == (expected.integers == expected.elements)


def test_images_are_told_from_text() -> None:
    parts = [
        {"type": "text", "text": "why?" * 10},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100}},
        {"type": "input_audio", "input_audio": {"data": "B" * 50, "format": "wav"}},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "so"}]
    data = json.dumps({"messages": messages}).encode()
    for body in (RequestBody(data), scanned(data)):
        summary = body.summary("messages")
        assert summary.data_strings == 2
        assert summary.characters == 42 + len("usertextimage_urlinput_audiowavuser")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [1, 2}', "the body is not valid JSON: Expecting ',' delimiter at byte 11"),
        ('{"é": nil}', "the body is not valid JSON: Expecting value at byte 7"),
        ('{"a": "éé\n"}', "the body is not valid JSON: Invalid control character at at byte 11"),
        ('{"a": "\\x"}', "the body is not valid JSON: Invalid \\escape at byte 7"),
        ('{"a": "b', "the body is not valid JSON: Unterminated string at byte 7"),
        ('{"a": NaN}', "the body is not valid JSON: NaN is not JSON"),
        ('{"a": 1} 2', "the body is not valid JSON: malformed object at byte 9"),
        ("[]", "the body must be a JSON object"),
    ],
)
def test_a_refusal_of_a_large_body_says_where(text: str, message: str) -> None:
    with pytest.raises(ScanError) as caught:
        scanned(text.encode())
    assert str(caught.value) == message


def large(value: str) -> bytes:
    return f'{{"prompt": {value}, "x": "{"y" * SMALL_BYTES}"}}'.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (large("[" + "[]," * 100_000 + "1]"), "more than 100,000 arrays and objects"),
        (large("[" * 901), "nested too deeply"),
        (large('{"a":' * 901), "nested too deeply"),
        (large("9" * 70_000), "a number of 65,536 characters or more"),
        (large("9" * 5_000), "digits"),
        (large("0." + "9" * 70_000), "a number of 65,536 characters or more"),
        (large('1, "' + "k" * 70_000 + '": 1'), "a key of more than 65,536 bytes"),
        (large("1," + ",".join(f'"{i}": 1' for i in range(1_000))), "more than 1,000 members"),
        (b"{" + b",".join(b'"%d": 1' % i for i in range(1_001)) + b"}", "more than 1,000 members"),
        (large('1, "prompt": 2'), "the key 'prompt' twice"),
        (large('1, "pr\\u006fmpt": 2'), "the key 'prompt' twice"),
        (large('"~"').replace(b"~", b"\xff"), "not UTF-8: byte 12"),
    ],
)
def test_what_costs_too_much_is_refused(data: bytes, message: str) -> None:
    assert message in refused(data)


def test_many_strings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "MAX_STRINGS", 1_000)
    assert "more than 1,000 strings" in refused(large("[" + '"",' * 1_000 + "1]"))


def test_a_byte_order_mark_is_no_part_of_a_large_body() -> None:
    data = large("1")
    for body in (RequestBody(b"\xef\xbb\xbf" + data), sliced(b"\xef\xbb\xbf" + data)):
        assert bytes(body.encode({})) == data


def test_of_a_large_body_only_what_is_short_is_copied() -> None:
    text = '"' + "t" * SMALL_BYTES + '"'
    data = f'{{"a": 1, "prompt": {text}, "b": 2, "suffix": {text}, "n": 3}}'.encode()
    made = RequestBody(data).encode({"n": 1}, last=b'"x": {}')
    assert isinstance(made, Pieces)
    assert bytes(made) == data.replace(b'"n": 3', b'"n": 1, "x": {}')
    assert len(made) == len(bytes(made))
    large = [part for part in made.parts if len(part) > 100]
    assert [isinstance(part, memoryview) and part.obj is data for part in large] == [True, True]
    assert len(made.parts) == 5


def sliced(data: bytes) -> RequestBody:
    reading = read_in_slices(data)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            body: RequestBody = end.value
            return body


def test_what_is_just_within_the_limits_is_taken() -> None:
    body = RequestBody(large("[" + "[]," * 99_998 + "1]"))
    assert body.summary("prompt").elements == 99_999


def test_a_large_member_is_not_decoded_to_be_looked_at() -> None:
    body = RequestBody(large("7"))
    assert body.values["prompt"] == 7
    assert "x" in body.values
    with pytest.raises(BodyError, match="x is larger than 131,072 bytes") as caught:
        body.values.get("x")
    assert caught.value.param == "x"
    assert body.large_values()["x"] == "y" * SMALL_BYTES


@pytest.mark.parametrize("element", [b"[7],", b'{"a":"b"},', b"7,"])
@pytest.mark.parametrize("size", [100_000, 200_000])
def test_what_waits_holds_little_more_than_its_bytes(size: int, element: bytes) -> None:
    """A waiting body held up to 26 times its size."""
    tracemalloc.start()
    try:
        data = b'{"prompt": [' + element * (size // len(element)) + b"1]}"
        body = RequestBody(data)
        peak = tracemalloc.get_traced_memory()[1]
        if isinstance(body.values, dict):
            body.forget_values()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * len(data)
    assert size < SMALL_BYTES or peak < 2.2 * len(data)


@pytest.mark.parametrize("value", [{"a": {"b": [1, "c", {}]}}, {"a": ["d", ["e"], {"f": 1}]}])
def test_a_space_behind_a_comma_or_a_colon_is_no_step_of_its_own(value: object) -> None:
    def steps(separators: tuple[str, str]) -> int:
        scan = JsonScanner(json.dumps(value, separators=separators).encode())
        return next(number for number in range(1_000) if scan.advance(1))

    assert steps((", ", ": ")) == steps((",", ":")) < steps((",  ", ":  "))


def test_a_large_body_is_read_in_slices() -> None:
    reading = read_in_slices(large("[" + "[]," * 50_000 + "1]"))
    assert sum(1 for _ in reading) > 30
