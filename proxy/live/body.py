"""The client's JSON body: parsed once, and rewritten only where an engine leg needs it.

The members are cut out of the text as they stand, so that everything a leg does not override reaches
the engine byte for byte: number formats, escapes and the order of keys. A decode body that
tokenises differently from its prefill body kills a vLLM decode engine, so nothing else may change.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from balanceroute.proxy.core.errors import BalanceRouteError

# Characters of a refused key that are told.
_MAX_NAME = 64
# Parsing takes some 970 levels and dumping a few less, so what is dumped again must stay well below.
_MAX_LEVELS = 100
# White space as in RFC 8259; \s matches more.
_SPACE = r"[ \t\n\r]*"
_KEY = rf'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"{_SPACE}:{_SPACE}'
_FIRST = re.compile(rf"{_SPACE}\{{{_SPACE}(?:{_KEY})?")
_NEXT = re.compile(rf"{_SPACE},{_SPACE}{_KEY}")
_END = re.compile(rf"{_SPACE}\}}{_SPACE}")


class BodyError(BalanceRouteError):
    """The body cannot be served; the message is for the client."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestBody:
    """A JSON object with the text of each member.

    Args:
        data: UTF-8 JSON.

    Attributes:
        values: The members, decoded.

    Raises:
        BodyError: Not a JSON object, or a key stands twice: two parsers might then read two
            different requests.
    """

    __slots__ = ("_ascii", "_places", "_text", "_view", "values")

    def __init__(self, data: bytes) -> None:
        data = data.removeprefix(BOM_UTF8)  # As FastAPI does, and so vLLM.
        try:
            self._text = data.decode()
        except UnicodeDecodeError as error:
            raise BodyError(f"the body is not UTF-8: byte {error.start}") from None
        # If so, a place in the text is the same place in the data.
        self._ascii = len(self._text) == len(data)
        self._view = memoryview(data)
        self.values: dict[str, Any] = {}
        # Where each member stands in the text, from its key to the end of its value.
        self._places: dict[str, tuple[int, int]] = {}
        try:
            self._parse()
        except json.JSONDecodeError as error:
            raise BodyError(f"the body is not valid JSON: {error.msg} at {error.pos}") from None
        except RecursionError:
            raise BodyError("the body is nested too deeply") from None
        except ValueError as error:
            # NaN and Infinity, and integers of more digits than Python converts.
            raise BodyError(f"the body is not valid JSON: {error}") from None
        if self._ascii:
            self._text = ""  # Not needed any more, and as large as the body.

    def encode(self, overrides: Mapping[str, object], drop: Collection[str] = ()) -> bytes:
        """Return the object without `drop` and with `overrides`, which come last."""
        # Pieces of the body itself, so that a prompt of megabytes is copied once.
        parts: list[bytes | memoryview] = []
        for key, (begin, end) in self._places.items():
            if key not in overrides and key not in drop:
                parts += (b", ", self._piece(begin, end))
        if overrides:
            parts += (b", ", _dump(overrides)[1:-1].encode())
        if not parts:
            return b"{}"
        parts[0] = b"{"
        parts.append(b"}")
        return b"".join(parts)

    def member(self, key: str) -> bytes | memoryview:
        """Return a member as it stands in the body, key and value; empty if it is absent."""
        begin, end = self._places.get(key, (0, 0))
        return self._piece(begin, end)

    def text_length(self, key: str) -> int:
        """Return the number of characters of a member's text; 0 if it is absent."""
        begin, end = self._places.get(key, (0, 0))
        return end - begin

    def _piece(self, begin: int, end: int) -> bytes | memoryview:
        if self._ascii:
            return self._view[begin:end]
        # It was decoded from UTF-8, so it holds no lone surrogate.
        return self._text[begin:end].encode()

    def _parse(self) -> None:
        text, values, places = self._text, self.values, self._places
        found = _FIRST.match(text)
        if found is None:
            raise BodyError("the body must be a JSON object")
        end = found.end()
        member = None if found[1] is None else found
        while member is not None:
            key = member[1]
            begin = member.start(1) - 1
            if "\\" in key:
                key, _ = _decode(text, begin)
            value, end = _decode(text, member.end())
            if key in values:
                name = key[:_MAX_NAME]
                raise BodyError(f"the body has the key {name!r} twice", name)
            values[key] = value
            places[key] = (begin, end)
            member = _NEXT.match(text, end)
        if _END.fullmatch(text, end) is None:
            raise json.JSONDecodeError("malformed object", text, end)


def is_deep(value: object) -> bool:
    """Return whether a decoded value is nested too deeply to be encoded again without risk."""
    level = [value]
    for _ in range(_MAX_LEVELS):
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


_decode = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode
_dump = json.JSONEncoder().encode
