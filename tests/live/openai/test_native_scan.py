"""The native library reads large bodies as Python does, and leaves it whatever is unusual."""

import ctypes
import json
from collections import Counter
from typing import cast

import pytest
from tests.native import needs_native
from tests.pump.bodies import PROMPTS, compare, read

from balanceroute.proxy.live.openai import native_scan
from balanceroute.proxy.live.openai.body import SMALL_BYTES, RequestBody, read_in_slices
from balanceroute.proxy.live.openai.json_scan import JsonScanner
from balanceroute.proxy.live.openai.native_scan import NativeScanner
from balanceroute.proxy.wire.http1.pump import Pump, load_library

pytestmark = needs_native
CASES = 4_000
LARGE = "x" * SMALL_BYTES
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief.\n"},
        *({"role": role, "content": 'Why "so"?\n数据 🦙'} for role in ("user", "assistant") * 40),
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None]}}}],
    "temperature": 0.7,
    "stream": True,
    "stop": ["\u2028", "\\"],
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_library()


def scanners(library: ctypes.CDLL, data: bytes) -> tuple[NativeScanner, JsonScanner]:
    return NativeScanner(library, data, PROMPTS), JsonScanner(data, PROMPTS)


def test_any_body_is_the_same_natively_and_in_python(library: ctypes.CDLL) -> None:
    ways = Counter(compare(library, seed) for seed in range(CASES))
    assert ways["natively"] > CASES / 2
    assert min(ways.values()) > CASES / 20


@pytest.mark.parametrize("ascii_alone", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_usual_body_is_read_natively_wherever_it_is_cut(
    library: ctypes.CDLL, ascii_alone: bool, indent: int | None
) -> None:
    data = json.dumps(CHAT, ensure_ascii=ascii_alone, indent=indent).encode()
    for work_ns in (1, 60, 1_000, 1_000_000):
        native, python = scanners(library, data)
        assert read(native, work_ns) == read(python, 1_000_000)
        assert native.is_native
        assert native.summaries["messages"].data_strings == 1


@pytest.mark.parametrize(
    "value",
    [
        json.dumps(list(range(100_000, 130_000))),
        json.dumps([[1, 2, 3]] * 9_000),
        json.dumps(["a", "b"] * 9_000),
        json.dumps("a\n" * 70_000),
        json.dumps("🦙é" * 30_000, ensure_ascii=False),
        json.dumps("🦙é" * 30_000),
        "9" * 19,
        "[" + "[" * 898 + "]" * 898 + "]",
        "[" + "[]," * 99_998 + "1]",
        "0." + "7" * 3_990,
    ],
    ids=lambda value: value[:9],
)
def test_what_is_usual_up_to_the_limits_is_read_natively(library: ctypes.CDLL, value: str) -> None:
    native, python = scanners(library, f'{{"prompt": {value}, "{"k" * 65_533}": 1}}'.encode())
    assert read(native, 4_000_000) == read(python, 4_000_000)
    assert native.is_native


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": 1, "prompt": 2}',
        '{"prompt": 1, "p\\u0072ompt": 2}',
        '{"messages": [{"d\\u0061ta": "x"}]}',
        '{"prompt": [1, 2.5]}',
        '{"prompt": [null]}',
        '{"prompt": ' + "9" * 20 + "}",
        '{"a": NaN}',
        '{"a": "\\x"}',
        '{"a": "\\ud8"}',
        '{"a": "\n"}',
        '{"a": 01}',
        '{"a": 1.}',
        '{"a": [1,]}',
        '{"a": 1,}',
        '{"a" 1}',
        '{"a": 1} 2',
        '{"a": "x',
        "[]",
        "",
        '{"' + "k" * 65_535 + '": 1}',
        '{"a": ' + "9" * 5_000 + "}",
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '{"a": [' + "[]," * 99_999 + "1]}",
        "{" + ", ".join(f'"m{number}": 1' for number in range(1_001)) + "}",
    ],
    ids=lambda text: text[:24],
)
def test_what_is_unusual_is_read_in_python(library: ctypes.CDLL, text: str) -> None:
    native, python = scanners(library, text.encode())
    assert read(native, 4_000_000) == read(python, 4_000_000)
    assert not native.is_native


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xe6\x95", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"]
)
@pytest.mark.parametrize("before", [0, 31, 32, 65_535, 65_536])
def test_what_is_not_utf_8_is_refused_as_in_python(
    library: ctypes.CDLL, bad: bytes, before: int
) -> None:
    native, python = scanners(library, b'{"prompt": "' + b"x" * before + bad + b'"}')
    found = read(native, 4_000_000)
    assert found == read(python, 4_000_000)
    assert "not UTF-8" in str(found)


def test_many_strings_are_refused_in_the_words_of_python(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list(native_scan._LIMITS)
    limits[1] = 10
    monkeypatch.setattr(native_scan, "_LIMITS", tuple(limits))
    for strings, is_native in ((9, True), (10, False)):
        native, python = scanners(library, json.dumps({"prompt": ["a"] * strings}).encode())
        assert read(native, 1_000) == read(python, 1_000)
        assert native.is_native == is_native


def test_a_large_body_is_read_in_slices_that_grow_with_the_work(library: ctypes.CDLL) -> None:
    reading = read_in_slices(
        f'{{"prompt": "{LARGE * 64}"}}'.encode(), pump=cast("Pump", Library(library))
    )
    assert 4 < sum(1 for _ in reading) < 20


@pytest.mark.parametrize("hashed", [False, True])
def test_a_body_that_was_read_natively_is_one_like_any_other(
    library: ctypes.CDLL, hashed: bool
) -> None:
    data = json.dumps({**CHAT, "suffix": LARGE}).encode()
    pump = Library(library)
    native, python = sliced(data, pump, hashed=hashed), sliced(data, None, hashed=hashed)
    assert pump.bodies == 1
    assert native.encode({"n": 1}).parts == python.encode({"n": 1}).parts  # type: ignore[union-attr]
    assert native.summary("messages") == python.summary("messages")
    assert native.texts_without(frozenset()) == python.texts_without(frozenset())
    assert list(native.values) == list(python.values) == [*CHAT, "suffix"]


def test_a_body_that_python_reads_on_does_not_count_as_read_natively(library: ctypes.CDLL) -> None:
    pump = Library(library)
    sliced(f'{{"suffix": "{LARGE}", "\\u0061": 1}}'.encode(), pump, hashed=False)
    assert pump.bodies == 0


class Library:
    """What a pump is to who reads bodies."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.bodies = 0


def sliced(data: bytes, pump: Library | None, *, hashed: bool) -> RequestBody:
    reading = read_in_slices(data, hashed=hashed, pump=cast("Pump | None", pump))
    while True:
        try:
            next(reading)
        except StopIteration as end:
            body: RequestBody = end.value
            return body
