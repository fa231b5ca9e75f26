"""Reads the same bodies by the native library and in Python, and compares all that comes of them.

    python -m tests.pump.bodies --cases 200000

A case is a request's body, spoiled or not, read in slices at random on both ways. Both must find the same
members at the same places and count the same in prompts, or refuse it in the same words.
"""

import argparse
import ctypes
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from balanceroute.proxy.live.openai import json_scan
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.json_scan import (
    DATA_MEMBERS,
    JsonScanner,
    PromptSummary,
    ScanError,
    summarise,
)
from balanceroute.proxy.live.openai.native_scan import NativeScanner
from balanceroute.proxy.wire.http1.pump import load_library

PROMPTS = frozenset({"input", "messages", "prompt", "token_ids"})
_NAMES = (*sorted(PROMPTS), "model", "tools", "max_tokens", "n", "stream", "system", "stop", "")
_KEYS = (*sorted(DATA_MEMBERS), "role", "content", "text", "type", "é", "parts", "k" * 300, "")
_PIECES = (
    *("a", "The quick brown fox. " * 5, " ", "/", "\x7f", "x" * 31, "y" * 64),
    *("é", "приве́т", "数据处理的", "हिन्दी", "한국어", "🦙"),
    # The first and the last characters of each length, and those around the surrogates.
    *("\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"),
)
_ESCAPES = (
    "\\n",
    "\\\\",
    '\\"',
    "\\/",
    "\\u0041",
    "\\ud83e\\udd99",
    "\\uD83E",
    "\\udd99",
    "\\u00e9",
)
_NUMBERS = ("0", "-0", "7", "-17", "1.5", "1E-7", "-1.5e+3", "1e400", "9" * 19, "9" * 30, "150000")
_ODD = (b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"-", b"0", b"e.", b"\x00", b"\n", b"\xff")
_ODDER = (
    b"\xe6\x95",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"NaN",
    b"Infinity",
    b"\\u12",
    b"\\x",
    b"\xc0\x80",
    *(b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xf5\x80\x80\x80", b"\xc1\xbf", b"\x80"),
)


class Drawing:
    """Draws bodies.

    Args:
        seed: Of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._escapes = self._rng.random() < 0.5
        self._spaces = self._rng.random() < 0.5

    def body(self) -> bytes:
        """Return one, of which two in five are spoiled."""
        rng = self._rng
        names = rng.sample(_NAMES, rng.randrange(7))
        members = [
            f"{self._string(name)}{self._space()}:{self._space()}{self._value(4)}" for name in names
        ]
        text = (
            "{"
            + self._space()
            + f"{self._space()},{self._space()}".join(members)
            + "}"
            + self._space()
        )
        data = text.encode()
        return self._spoiled(data) if rng.random() < 0.4 else data

    def work(self) -> int:
        """Return how much is read in a slice."""
        return self._rng.choice((1, 4, 40, 400, 1_000_000))

    def _spoiled(self, data: bytes) -> bytes:
        rng, spoiled = self._rng, bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(spoiled) + 1)
            spoiled[at : at + rng.randrange(3)] = rng.choice(
                (*_ODD, *_ODDER, b"", rng.randbytes(2))
            )
        return bytes(spoiled[: rng.randrange(len(spoiled) + 1)] if rng.random() < 0.1 else spoiled)

    def _space(self) -> str:
        return self._rng.choice(("", "", " ", "  \n", "\t\r")) if self._spaces else ""

    def _string(self, text: str) -> str:
        """Return a JSON string of some text."""
        written = json.dumps(text, ensure_ascii=self._rng.random() < 0.05)
        return (
            f'"\\u{ord(text[0]):04x}{written[2:]}'
            if text and self._rng.random() < 0.005
            else written
        )

    def _text(self) -> str:
        pieces = _PIECES + _ESCAPES if self._escapes else _PIECES
        return '"' + "".join(self._rng.choices(pieces, k=self._rng.randrange(9))) + '"'

    def _value(self, levels: int) -> str:
        rng = self._rng
        kind = rng.randrange(8 if levels else 4)
        if kind < 2:
            return self._text()
        if kind == 2:
            return rng.choice(_NUMBERS)
        if kind == 3:
            return rng.choice(("true", "false", "null"))
        if kind == 4:
            return self._array([rng.choice(_NUMBERS[:4]) for _ in range(rng.randrange(40))])
        if kind == 5:
            return self._array([self._value(levels - 1) for _ in range(rng.randrange(7))])
        return self._object(levels)

    def _array(self, elements: list[str]) -> str:
        comma = f"{self._space()},{self._rng.choice(('', ' '))}{self._space()}"
        return f"[{self._space()}{comma.join(elements)}{self._space()}]"

    def _object(self, levels: int) -> str:
        keys = self._rng.choices(_KEYS, k=self._rng.randrange(4))
        pairs = [f"{self._string(key)}:{self._space()}{self._value(levels - 1)}" for key in keys]
        return "{" + f"{self._space()},".join(pairs) + self._space() + "}"


Found = tuple[dict[str, tuple[int, int, int]], dict[str, PromptSummary]]


def read(scan: "JsonScanner | NativeScanner", work_ns: int) -> Found | str:
    """Return what a scanner finds, or why it refuses."""
    try:
        while not scan.advance(work_ns):
            pass
    except ScanError as error:
        return f"{type(error).__name__}: {error}"
    return scan.members, scan.summaries


@contextmanager
def narrow(window: int) -> Iterator[None]:
    """Have the scanner in Python read in short pieces."""
    names = ("_STRING_WINDOW", "_SPACES_WINDOW", "_NUMBERS_WINDOW")
    before = [getattr(json_scan, name) for name in names]
    for name in names:
        setattr(json_scan, name, window)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(json_scan, name, value)


def compare(library: ctypes.CDLL, seed: int) -> str:
    """Read one body on both ways; return how: "natively", "in Python" after all, or "refused"."""
    drawing = Drawing(seed)
    data = drawing.body()
    native = NativeScanner(library, data, PROMPTS)
    # Of two errors in one piece the windows say which is told.
    with narrow(16 if seed % 2 else 65_536):
        found = read(native, drawing.work())
        expected = read(JsonScanner(data, PROMPTS), drawing.work())
    assert found == expected, data
    if isinstance(found, str):
        return "refused"
    if not native.is_native:
        return "in Python"
    _check_counts(RequestBody(data), found[1], data)
    return "natively"


def _check_counts(body: RequestBody, summaries: dict[str, PromptSummary], data: bytes) -> None:
    """Compare with what the decoded prompts have; of a key that stands twice those have one value."""
    for name, summary in summaries.items():
        text = body.value_text(name)
        whole = json.loads(bytes(text), object_pairs_hook=list)
        if json.dumps(whole) != json.dumps(list_of(body.values[name])):
            continue
        expected = summarise(body.values[name])
        counted = ("elements", "texts", "integers", "arrays", "objects", "inner")
        for attribute in counted:
            assert getattr(summary, attribute) == getattr(expected, attribute), data


def list_of(value: object) -> object:
    """Return a decoded value with lists of pairs in place of objects."""
    if isinstance(value, dict):
        return [(key, list_of(one)) for key, one in value.items()]
    if isinstance(value, list):
        return [list_of(one) for one in value]
    return value


def main() -> int:
    """Compare, and print what was; return 1 if anything differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    library = load_library()
    ways: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.cases):
        try:
            ways[compare(library, seed)] += 1
        except AssertionError as error:
            ways["differ"] += 1
            sys.stdout.write(f"seed {seed}: {str(error)[:3000]}\n")
            if ways["differ"] > 4:
                break
    sys.stdout.write(f"{ways.total()} cases: {dict(ways)}\n")
    return 1 if ways["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
