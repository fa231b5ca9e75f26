"""The client's JSON body: read once, and rewritten only where an engine leg needs it.

The members are cut out of the bytes as they stand, so that everything a leg does not override reaches
the engine byte for byte: number formats, escapes and the order of keys. A decode body that
tokenises differently from its prefill body kills a vLLM decode engine, so nothing else may change.

A small body is decoded at once, which is quickest. Of a large one no member is decoded until it is
asked for, and a request that waits keeps its bytes alone.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from json.encoder import (  # type: ignore[attr-defined]  # typeshed leaves the first out.
    c_make_encoder,
    encode_basestring_ascii,
)
from typing import Any, NoReturn

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.json_scan import (
    MAX_LEVELS,
    MAX_MEMBERS,
    DuplicateKeyError,
    JsonScanner,
    PromptSummary,
    ScanError,
    summarise,
)
from balanceroute.proxy.live.openai.native_scan import NativeScanner
from balanceroute.proxy.wire.http1.pump import Pump
from balanceroute.proxy.wire.messages import Payload, Pieces

# Bytes of a body that is decoded at once, and of a member that is decoded at all: the worst of that
# size takes some 15 ms and 4 MB.
SMALL_BYTES = 131_072
# Members that may be large in an ordinary request: the prompts of the endpoints.
_PROMPTS = frozenset({"input", "messages", "prompt", "token_ids"})
# One slice of reading a large body.
_SLICE_NS = 4_000_000
# Of a large body, pieces that are put together: to write one more costs as much as to copy it.
_SHORT_PIECE = 65_536
_HASH_SLICE = 1 << 20
_HASH_BYTES = 16
# Characters of a refused key that the error shows.
_MAX_NAME = 64
# `json` dumps some 960 levels on Python 3.11, so what is dumped again must stay well below.
_MAX_LEVELS = 100
# White space as in RFC 8259; \s matches more.
_SPACE = r"[ \t\n\r]*"
_KEY = rf'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"{_SPACE}:{_SPACE}'
_FIRST = re.compile(rf"{_SPACE}\{{{_SPACE}(?:{_KEY})?")
_NEXT = re.compile(rf"{_SPACE},{_SPACE}{_KEY}")
_END = re.compile(rf"{_SPACE}\}}{_SPACE}")

Scanner = JsonScanner | NativeScanner
Places = Mapping[str, tuple[int, int, int]]
"""Of each member where it begins, where its value begins and where it ends, in bytes."""


class BodyError(BalanceRouteError):
    """The body cannot be served; the message is for the client."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestBody:
    """A JSON object with the text of each member.

    Args:
        data: UTF-8 JSON.
        scan: Has read `data` already.

    Attributes:
        values: The members, decoded. One of more than `SMALL_BYTES` is refused when it is asked for.
        model: What engines get for `model` in place of the client's; None for that.

    Raises:
        BodyError: Not a JSON object, or a key stands twice: two parsers might then read two
            different requests. Or it costs more to read than any request should.
    """

    __slots__ = ("_data", "_digests", "_places", "_summaries", "model", "values")

    def __init__(self, data: bytes, scan: Scanner | None = None) -> None:
        data = data.removeprefix(BOM_UTF8)  # As FastAPI does, and so vLLM.
        self._data = data
        self.model: str | None = None
        self._digests: dict[tuple[int, int], bytes] = {}
        self._summaries: dict[str, PromptSummary] = {}
        self.values: Mapping[str, Any]
        self._places: Places
        if scan is None and len(data) <= SMALL_BYTES:
            self.values, self._places = read_object(data)
            return
        if scan is None:
            scan = JsonScanner(data, _PROMPTS)
            while not _advance(scan):
                pass
        self._summaries = scan.summaries
        self._places = scan.members
        self.forget_values()

    def forget_values(self) -> None:
        """Keep no decoded member from now on: each is decoded whenever it is asked for."""
        self.values = Members(self._data, self._places, SMALL_BYTES)

    def large_values(self) -> "Members":
        """Return the members, decoded whatever their size; expensive."""
        return Members(self._data, self._places, len(self._data))

    def encode(
        self,
        overrides: Mapping[str, object],
        drop: AbstractSet[str] = frozenset(),
        *,
        last: bytes = b"",
    ) -> Payload:
        """Return the object without `drop`, with `overrides` behind its members, and then `last`.

        Args:
            overrides: Members with these names are left out.
            drop: Names of members that are left out.
            last: More members as JSON, of names that are in `drop`; empty for none.
        """
        if self.model is not None:
            overrides = {"model": self.model, **overrides}
        if overrides:
            drop = drop | overrides.keys()
        is_small = len(self._data) <= SMALL_BYTES
        data = self._data if is_small else memoryview(self._data)
        parts: list[bytes | memoryview] = [
            data[begin:end] for key, (begin, _, end) in self._places.items() if key not in drop
        ]
        if overrides:
            parts.append(dump(overrides)[1:-1])
        if last:
            parts.append(last)
        return b"{%b}" % b", ".join(parts) if is_small else _in_pieces(parts)

    def member(self, key: str) -> memoryview:
        """Return a member as it stands in the body, key and value; empty if it is absent."""
        begin, _, end = self._places.get(key, (0, 0, 0))
        return memoryview(self._data)[begin:end]

    def value_text(self, key: str) -> memoryview:
        """Return the text of a value as it stands in the body; empty if the member is absent."""
        _, begin, end = self._places.get(key, (0, 0, 0))
        return memoryview(self._data)[begin:end]

    def is_given(self, key: str) -> bool:
        """Return whether a member is there and not null."""
        _, begin, end = self._places.get(key, (0, 0, 0))
        return begin < end and self._data[begin:end] != b"null"

    def part(self, begin: int, end: int) -> memoryview:
        return memoryview(self._data)[begin:end]

    def large_value(self, key: str) -> memoryview | None:
        """Return the text of a value that is too large to be decoded; None for any other."""
        _, begin, end = self._places.get(key, (0, 0, 0))
        return memoryview(self._data)[begin:end] if end - begin > SMALL_BYTES else None

    def fingerprint(self, key: str) -> memoryview | bytes:
        """Return the text of a member, or its hash if it is large: equal for equal members only."""
        begin, _, end = self._places.get(key, (0, 0, 0))
        return self.digest(begin, end) if end - begin > SMALL_BYTES else self.member(key)

    def texts_without(self, without: AbstractSet[str]) -> bytes:
        """Return the other members by name: their texts as they stand, or the hashes of large ones."""
        places, data = self._places, self._data
        parts: list[bytes] = []
        for name in sorted(places.keys() - without):
            _, begin, end = places[name]
            text = data[begin:end] if end - begin <= SMALL_BYTES else self.digest(begin, end)
            parts += (name.encode("utf-8", "surrogatepass"), text)
        return b"\0".join(parts)

    def digest(self, begin: int, end: int) -> bytes:
        found = self._digests.get((begin, end))
        return (
            blake2b(self.part(begin, end), digest_size=_HASH_BYTES).digest()
            if found is None
            else found
        )

    def hash_in_slices(self) -> Generator[None, None, None]:
        """Hash the large members, as far as they are hashed, yielding every few milliseconds."""
        parts = [(begin, end) for begin, _, end in self._places.values()]
        for summary in self._summaries.values():
            parts += [*summary.heads, summary.middle]
        for begin, end in parts:
            if end - begin <= SMALL_BYTES:
                continue
            hasher = blake2b(digest_size=_HASH_BYTES)
            for at in range(begin, end, _HASH_SLICE):
                hasher.update(self.part(at, min(end, at + _HASH_SLICE)))
                yield
            self._digests[begin, end] = hasher.digest()

    def summary(self, key: str) -> PromptSummary:
        """Return what a prompt consists of (`_PROMPTS`); nothing if it is absent."""
        summary = self._summaries.get(key)
        if summary is None:
            summary = self._summaries[key] = summarise(self.values.get(key))
        return summary


class Members(Mapping[str, Any]):
    """The members of a body, each decoded whenever it is asked for.

    Args:
        most: Bytes of one that is still decoded.
    """

    __slots__ = ("_data", "_most", "_places")

    def __init__(self, data: bytes, places: Places, most: int) -> None:
        self._data = data
        self._places = places
        self._most = most

    def __getitem__(self, key: str) -> Any:
        """Decode a member. Raises BodyError if it is too large or too deep for that."""
        _, begin, end = self._places[key]
        if end - begin > self._most:
            raise BodyError(f"{key} is larger than {self._most:,} bytes", key)
        try:
            return _decode(self._data[begin:end].decode())[0]
        except RecursionError:
            raise BodyError("the body is nested too deeply") from None

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _in_pieces(members: Iterable[bytes | memoryview]) -> Pieces:
    """Return an object of these members, of which only the short ones are copied."""
    pieces: list[bytes | memoryview] = []
    short: list[bytes | memoryview] = [b"{"]
    for number, member in enumerate(members):
        if number:
            short.append(b", ")
        if len(member) < _SHORT_PIECE:
            short.append(member)
        else:
            pieces += (b"".join(short), member)
            short.clear()
    short.append(b"}")
    pieces.append(b"".join(short))
    return Pieces(pieces)


def read_in_slices(
    data: bytes, *, hashed: bool = False, pump: Pump | None = None
) -> Generator[None, None, RequestBody]:
    """Read a body of more than `SMALL_BYTES`, yielding whenever that has taken some milliseconds.

    Args:
        data: The body.
        hashed: Whether to prepare `fingerprint` and `digest` too.
        pump: Has the native library, and counts what that reads alone; None to read in Python.

    Raises:
        BodyError: See `RequestBody`.
    """
    data = data.removeprefix(BOM_UTF8)
    scan: Scanner = (
        JsonScanner(data, _PROMPTS) if pump is None else NativeScanner(pump.library, data, _PROMPTS)
    )
    while not _advance(scan):
        yield
    if pump is not None and isinstance(scan, NativeScanner) and scan.is_native:
        pump.bodies += 1
    body = RequestBody(data, scan)
    if hashed:
        yield from body.hash_in_slices()
    return body


def _advance(scan: Scanner) -> bool:
    try:
        return scan.advance(_SLICE_NS)
    except DuplicateKeyError as error:
        raise _twice(error.key) from None
    except ScanError as error:
        raise BodyError(str(error)) from None


def _twice(key: str) -> BodyError:
    name = key[:_MAX_NAME]
    return BodyError(f"the body has the key {name!r} twice", name)


def read_object(data: bytes) -> tuple[dict[str, Any], Places]:
    """Decode all of a small body; return its members and where they stand. Raises BodyError."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8: byte {error.start}") from None
    try:
        values, in_text = _parse_text(text)
    except json.JSONDecodeError as error:
        raise BodyError(f"the body is not valid JSON: {error.msg} at {error.pos}") from None
    except StopIteration as error:  # How a scanner says that no value begins there.
        text_at = f"Expecting value at {error.value}"
        raise BodyError(f"the body is not valid JSON: {text_at}") from None
    except RecursionError:
        raise BodyError("the body is nested too deeply") from None
    except ValueError as error:
        # NaN and Infinity, and integers of more digits than Python converts.
        raise BodyError(f"the body is not valid JSON: {error}") from None
    # Python 3.11 parses some 970 levels, 3.14 tens of thousands.
    if text.count("[") + text.count("{") > MAX_LEVELS and is_deep(values, MAX_LEVELS + 1):
        raise BodyError("the body is nested too deeply")
    if len(text) == len(data):  # A place in the text is the same place in the data.
        return values, in_text
    return values, _in_bytes(text, in_text)


def _parse_text(text: str) -> tuple[dict[str, Any], dict[str, tuple[int, int, int]]]:
    values: dict[str, Any] = {}
    places: dict[str, tuple[int, int, int]] = {}
    scan, following = _scan, _NEXT.match
    found = _FIRST.match(text)
    if found is None:
        raise BodyError("the body must be a JSON object")
    end = found.end()
    member = None if found[1] is None else found
    while member is not None:
        key = member[1]
        begin, value_begin = member.start(1) - 1, member.end()
        if "\\" in key:
            key, _ = scan(text, begin)
        value, end = scan(text, value_begin)
        if key in values:
            raise _twice(key)
        values[key] = value
        places[key] = begin, value_begin, end
        if len(values) > MAX_MEMBERS:
            raise BodyError(f"the body has more than {MAX_MEMBERS:,} members")
        member = following(text, end)
    if text[end:] != "}" and _END.fullmatch(text, end) is None:
        raise json.JSONDecodeError("malformed object", text, end)
    return values, places


def _in_bytes(text: str, places: Places) -> Places:
    seen = at = 0
    translated: dict[str, tuple[int, int, int]] = {}
    for key, member in places.items():
        bounds = []
        for place in member:
            # It was decoded from UTF-8, so it holds no lone surrogate.
            at += len(text[seen:place].encode())
            seen = place
            bounds.append(at)
        translated[key] = (bounds[0], bounds[1], bounds[2])
    return translated


def may_be_deep(text: bytes) -> bool:
    """Return whether a value of some JSON may be deep; see `is_deep`, which costs far more."""
    return text.count(b"[") + text.count(b"{") >= _MAX_LEVELS


def is_deep(value: object, levels: int = _MAX_LEVELS) -> bool:
    """Return whether a decoded value has so many levels: by default too many to encode it again."""
    level = [value]
    for _ in range(levels):
        inner: list[object] = []
        for node in level:
            if isinstance(node, dict):
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        if not inner:
            return False
        level = inner
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def dump(value: object) -> bytes:
    """Return a value as JSON, spaced and escaped as `json.dumps` does it."""
    return "".join(_dump_in_pieces(value, 0)).encode()


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
_decode = _decoder.raw_decode
# Behind it; typeshed leaves it out. A body has a dozen members, and the way there costs more than most.
_scan: Callable[[str, int], tuple[Any, int]] = _decoder.scan_once  # type: ignore[attr-defined]
# What `JSONEncoder.encode` makes anew for each call, at more than the cost of the call.
_dump_in_pieces: Callable[[object, int], Iterable[str]] = c_make_encoder(
    *(None, json.JSONEncoder().default, encode_basestring_ascii, None, ": ", ", "),
    *(False, False, True),
)
