"""One large JSON object, read in slices: is it valid, and where does each of its members stand?

Decoding a body of megabytes takes up to thirty times its size and holds the event loop for seconds.
This scanner keeps nothing of it but the object's own keys. It takes what `json` takes and refuses what
`json` refuses, and moreover what would cost too much (see the limits). Its user decides how much is
read at a time.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
from msgspec import Struct

from balanceroute.proxy.core.errors import BalanceRouteError

# What a prompt consists of: counts that routing and charging need, without its text.

# Members of a message's parts that hold data or where it is, in the words of the endpoints: images,
# sound and files in base64, which say nothing about the number of tokens.
DATA_MEMBERS = frozenset(
    {
        "audio_url",
        "data",
        "file_data",
        "file_url",
        "image_embeds",
        "image_url",
        "url",
        "video_url",
    }
)
# Elements whose places are kept.
HEADS = 4


class PromptSummary(Struct):
    """Counts of one member's value."""

    elements: int = 0  # Of the array that it is; 0 if it is none.
    texts: int = 0  # Elements that are strings.
    integers: int = 0  # Elements that are integers.
    arrays: int = 0  # Elements that are arrays.
    objects: int = 0  # Elements that are objects.
    inner: int = 0  # Elements of those arrays, in all.
    characters: int = 0  # Of its strings, decoded; keys and data (see `DATA_MEMBERS`) do not count.
    data_strings: int = 0  # Strings that are data.
    # Where the first elements begin and end that are objects or arrays, in bytes of the body. They
    # and `last` are known of a large body alone.
    heads: list[tuple[int, int]] = []
    last: int = 0  # Where the last such element begins.

    @property
    def middle(self) -> tuple[int, int]:
        """The place between the first elements and the last one, in bytes of the body."""
        begin = self.heads[-1][1] if self.heads else 0
        return begin, max(begin, self.last)

    def count(self, kind: type, count: int) -> None:
        self.elements += count
        if kind is str:
            self.texts += count
        elif kind is int:
            self.integers += count
        elif kind is list:
            self.arrays += count
        elif kind is dict:
            self.objects += count


def summarise(value: object) -> PromptSummary:
    summary = PromptSummary()
    if isinstance(value, str):
        summary.characters = len(value)
        return summary
    if isinstance(value, list):
        # Not a loop over elements: a prompt may have thousands, and token ids are the usual ones.
        if set(map(type, value)) == {int}:
            summary.count(int, len(value))
            return summary
        for kind, count in Counter(map(type, value)).items():
            summary.count(kind, count)
        if summary.arrays:
            summary.inner = sum(len(element) for element in value if isinstance(element, list))
    _count_text(value, summary)
    return summary


def _count_text(value: object, summary: PromptSummary) -> None:
    inner = [(value, True)]
    characters = data_strings = 0
    for node, is_text in inner:  # It grows meanwhile.
        if isinstance(node, str):
            if is_text:
                characters += len(node)
            else:
                data_strings += 1
        elif isinstance(node, dict):
            inner += ((below, key not in DATA_MEMBERS) for key, below in node.items())
        elif isinstance(node, list):
            inner += ((below, is_text) for below in node if type(below) is not int)
    summary.characters = characters
    summary.data_strings = data_strings


# Of one body: arrays and objects, and strings with the keys among them. A long conversation has some
# thousands. Each takes a microsecond or more here, and a hundred bytes in whatever decodes it.
MAX_CONTAINERS = 100_000
MAX_STRINGS = 1_000_000
# On Python 3.11 `json` takes some 970, less those of its caller.
MAX_LEVELS = 900
MAX_MEMBERS = 1_000  # Of the object itself.
MAX_KEY = 65_536
_MAX_NUMBER = 65_536
# Work is counted in nanoseconds, roughly: of a step, and of a byte within one.
_STEP = 1_000
_STRING_BYTE = 3
_PLAIN_BYTE = 1
_NUMBER_BYTE = 40
_SPACE_BYTE = 5
# Bytes that are read in one step. Those of a string stay in a core's cache, as they are read some times.
_STRING_WINDOW = 262_144
_SPACES_WINDOW = 65_536
_NUMBERS_WINDOW = 16_384

_SPACES = b" \t\n\r"
_QUOTE, _COMMA, _COLON, _BACKSLASH, _SPACE = b'",:\\ '
_ARRAY, _OBJECT, _ARRAY_END, _OBJECT_END = b"[{]}"
# One space as programs write it behind a colon or a comma is read with that: a step costs far more.
_plain_key = re.compile(rb'"([^"\\\x00-\x1f]{0,255}+)"[ \t\n\r]{0,255}+: ?+').match
_spaces = re.compile(rb"[ \t\n\r]*+").match
_SEPARATOR = rb"[ \t\n\r]*+,[ \t\n\r]*+"
_NUMBER = rb"-?+(?:0|[1-9][0-9]{0,4000}+)(?:\.[0-9]{1,4000}+)?+(?:[eE][+-]?+[0-9]{1,4000}+)?+"
_INTEGERS = rb"(?:-?+(?:0|[1-9][0-9]{0,18}+)" + _SEPARATOR + rb")++"
_SCALARS = rb"(?:(?:" + _NUMBER + rb"|true|false|null)" + _SEPARATOR + rb")++"
_RUNS = ((int, re.compile(_INTEGERS).match), (float, re.compile(_SCALARS).match))
_number = re.compile(rb"-?+(?:0|[1-9][0-9]*+)((?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+)").match
_word = re.compile(rb"true|false|null").match
_constant = re.compile(rb"NaN|-?Infinity").match
_first_half = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}").fullmatch
_decode_string = json.JSONDecoder().raw_decode


class ScanError(BalanceRouteError):
    """The text is refused; the message is for the client."""


class JsonScanner:
    """Reads one object."""

    __slots__ = (
        "_at",
        "_containers",
        "_data",
        "_first",
        "_is_text",
        "_key_begin",
        "_member",
        "_member_value",
        "_name",
        "_next",
        "_stack",
        "_strings",
        "_summarised",
        "_summary",
        "members",
        "summaries",
    )

    def __init__(self, data: bytes, summarised: Collection[str] = ()) -> None:
        # Of each member where it begins, where its value begins and where it ends, in bytes.
        self.members: dict[str, tuple[int, int, int]] = {}
        self.summaries: dict[str, PromptSummary] = {}  # What the summarised members consist of.
        self._data = data
        self._at = 0
        # No bound method: it would make a cycle that keeps the body.
        self._next: Callable[[JsonScanner], int] | None = JsonScanner._begin
        self._stack = bytearray()  # The opening brackets.
        self._first = False  # Right behind an opening bracket.
        self._containers = self._strings = 0
        self._key_begin = -1  # Of the present string, if it is a key.
        self._is_text = True  # The present string is neither data nor where it is.
        # The present member.
        self._name = ""
        self._member = self._member_value = 0
        self._summarised = summarised
        self._summary: PromptSummary | None = None

    def advance(self, work_ns: int) -> bool:
        """Read on for about that long on a usual core; return whether the object is complete.

        Raises:
            ScanError: The object is refused. Do not go on.
        """
        step = self._next
        while step is not None and work_ns > 0:
            work_ns -= step(self)
            step = self._next
        return step is None

    # Steps. Each returns the work it was.

    def _begin(self) -> int:
        byte = self._peek()
        if byte in _SPACES:
            return self._skip_spaces()
        if byte != _OBJECT:
            raise ScanError("the body must be a JSON object")
        self._open(_OBJECT)
        return _STEP

    def _end(self) -> int:
        if self._peek() in _SPACES:
            return self._skip_spaces()
        if self._at < len(self._data):
            raise self._malformed("malformed object")
        self._next = None
        return _STEP

    def _key(self) -> int:
        byte, at = self._peek(), self._at
        if byte in _SPACES:
            return self._skip_spaces()
        if byte == _OBJECT_END and self._first:
            return self._close()
        found = _plain_key(self._data, at, at + 512)
        if found is not None:
            self._count_string()
            self._take_key(self._text(at + 1, found.end(1)), at)
            self._at = found.end()
            self._next = JsonScanner._value
        elif byte == _QUOTE:
            self._key_begin = at
            self._begin_string()
        else:
            raise self._malformed("Expecting property name enclosed in double quotes")
        return _STEP

    def _colon(self) -> int:
        byte = self._peek()
        if byte in _SPACES:
            return self._skip_spaces()
        if byte != _COLON:
            raise self._malformed("Expecting ':' delimiter")
        self._at += 1
        self._next = JsonScanner._value
        return _STEP

    def _value(self) -> int:
        byte = self._peek()
        if byte in _SPACES:
            return self._skip_spaces()
        if byte == _ARRAY_END and self._first and self._stack[-1] == _ARRAY:
            return self._close()
        if len(self._stack) == 1:
            self._member_value = self._at
        if byte == _QUOTE:
            self._count_element(str)
            self._begin_string()
        elif byte in (_ARRAY, _OBJECT):
            self._count_element(list if byte == _ARRAY else dict)
            self._note_place()
            self._open(byte)
        else:
            return self._scalars()
        return _STEP

    def _comma(self) -> int:
        byte = self._peek()
        if byte in _SPACES:
            return self._skip_spaces()
        is_array = self._stack[-1] == _ARRAY
        if byte == _COMMA:
            self._at += 1
            if self._peek() == _SPACE:
                self._at += 1
            self._first = False
            self._next = JsonScanner._value if is_array else JsonScanner._key
        elif byte == (_ARRAY_END if is_array else _OBJECT_END):
            return self._close()
        else:
            raise self._malformed("Expecting ',' delimiter")
        return _STEP

    def _string(self) -> int:
        """Read a piece of a string. If it is not plain, `json` judges it, as if it ended there."""
        data, begin = self._data, self._at
        end = _piece_end(data, begin)
        characters = plain_characters(data, begin, end)
        if characters is not None:
            # Else the quote is escaped, as `_piece_end` passes over those alone.
            ended = data[end - 1] == _QUOTE and data[end - 2] != _BACKSLASH
            if end < len(data) or ended:
                self._at = end
                self._take_content(characters - ended, ended=ended)
                return _STEP + _PLAIN_BYTE * (end - begin)
        piece = self._text(begin, end)
        try:
            content, stop = _decode_string(f'"{piece}"')
        except json.JSONDecodeError as error:
            self._at += len(piece[: max(error.pos - 1, 0)].encode())
            raise self._malformed(error.msg) from None
        ended = stop < len(piece) + 2
        if ended:
            self._at += stop - 1 if piece.isascii() else len(piece[: stop - 1].encode())
        elif end == len(data):
            raise self._malformed("Unterminated string")
        else:
            self._at = end
        self._take_content(len(content), ended=ended)
        return _STEP + _STRING_BYTE * (end - begin)

    def _scalars(self) -> int:
        """Read a number or a word; in an array as many as there are in a row."""
        data, at = self._data, self._at
        if self._stack[-1] == _ARRAY:
            for kind, run in _RUNS:
                row = run(data, at, at + _NUMBERS_WINDOW)
                if row is not None:
                    self._at = row.end()
                    self._first = False
                    self._count_element(kind, data.count(b",", at, self._at))
                    return _STEP + _NUMBER_BYTE * (self._at - at)
        found = _number(data, at, at + _MAX_NUMBER)
        if found is None:
            found = _word(data, at, at + 5)
            if found is None:
                raise self._no_value()
            self._count_element(bool)
        else:
            _check_number(found)
            self._count_element(float if found[1] else int)
        self._at = found.end()
        self._ended()
        return _STEP + _NUMBER_BYTE * (found.end() - at)

    def _no_value(self) -> ScanError:
        constant = _constant(self._data, self._at, self._at + 9)
        if constant is None:
            return self._malformed("Expecting value")
        return ScanError(f"the body is not valid JSON: {constant[0].decode()} is not JSON")

    # Within a step.

    def _peek(self) -> int:
        """Return the next byte; behind the last one 0, which stands nowhere in JSON."""
        return self._data[self._at] if self._at < len(self._data) else 0

    def _skip_spaces(self) -> int:
        begin = self._at
        found = _spaces(self._data, begin, begin + _SPACES_WINDOW)
        assert found is not None, "it may be empty"
        self._at = found.end()
        return _STEP + _SPACE_BYTE * (self._at - begin)

    def _open(self, bracket: int) -> None:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise ScanError(f"the body has more than {MAX_CONTAINERS:,} arrays and objects")
        if len(self._stack) == MAX_LEVELS:
            raise ScanError("the body is nested too deeply")
        self._stack.append(bracket)
        self._at += 1
        self._first = True
        self._next = JsonScanner._value if bracket == _ARRAY else JsonScanner._key

    def _close(self) -> int:
        self._stack.pop()
        self._at += 1
        summary = self._summary
        if len(self._stack) == 2 and summary is not None and len(summary.heads) < HEADS:
            summary.heads.append((summary.last, self._at))
        self._ended()
        return _STEP

    def _ended(self) -> None:
        depth = len(self._stack)
        self._next = JsonScanner._comma if depth else JsonScanner._end
        if depth == 1:
            self.members[self._name] = (self._member, self._member_value, self._at)
            self._summary = None

    def _begin_string(self) -> None:
        self._count_string()
        self._at += 1
        self._next = JsonScanner._string
        if self._summary is not None and self._key_begin < 0 and not self._is_text:
            self._summary.data_strings += 1

    def _take_content(self, characters: int, *, ended: bool) -> None:
        summary, begin = self._summary, self._key_begin
        if begin < 0:
            if summary is not None and self._is_text:
                summary.characters += characters
            if ended:
                self._ended()
            return
        if self._at - begin > MAX_KEY:
            raise ScanError(f"the body has a key of more than {MAX_KEY:,} bytes")
        if ended:
            self._key_begin = -1
            # Whole, because a pair of escapes may have been cut.
            self._take_key(_decode_string(self._text(begin, self._at))[0], begin)
            self._next = JsonScanner._colon

    def _take_key(self, key: str, begin: int) -> None:
        if len(self._stack) > 1:
            self._is_text = key not in DATA_MEMBERS
            return
        if key in self.members:
            raise DuplicateKeyError(key)
        if len(self.members) == MAX_MEMBERS:
            raise ScanError(f"the body has more than {MAX_MEMBERS:,} members")
        self._name, self._member = key, begin
        self._is_text = True
        if key in self._summarised:
            self._summary = self.summaries[key] = PromptSummary()

    def _count_string(self) -> None:
        self._strings += 1
        if self._strings > MAX_STRINGS:
            raise ScanError(f"the body has more than {MAX_STRINGS:,} strings")

    def _count_element(self, kind: type, count: int = 1) -> None:
        summary, stack = self._summary, self._stack
        if summary is None or len(stack) < 2 or stack[1] != _ARRAY:
            return
        if len(stack) == 2:
            self._is_text = True
            summary.count(kind, count)
        elif len(stack) == 3 and stack[2] == _ARRAY:
            summary.inner += count

    def _note_place(self) -> None:
        if self._summary is not None and len(self._stack) == 2:
            self._summary.last = self._at

    def _text(self, begin: int, end: int) -> str:
        try:
            return self._data[begin:end].decode()
        except UnicodeDecodeError as error:
            raise ScanError(f"the body is not UTF-8: byte {begin + error.start}") from None

    def _malformed(self, message: str) -> ScanError:
        return ScanError(f"the body is not valid JSON: {message} at byte {self._at}")


class DuplicateKeyError(ScanError):
    """A key of the object itself stands twice."""

    def __init__(self, key: str) -> None:
        super().__init__("a key stands twice")
        self.key = key


def _check_number(found: "re.Match[bytes]") -> None:
    size = found.end() - found.start()
    if size >= _MAX_NUMBER:
        raise ScanError(f"the body has a number of {_MAX_NUMBER:,} characters or more")
    if size > 4_000 and not found[1]:
        try:
            int(found[0])
        except ValueError as error:  # More digits than Python converts.
            raise ScanError(f"the body is not valid JSON: {error}") from None


def decoded_beginning(text: bytes) -> str:
    """Decode a string of a valid object that is cut off somewhere, as far as it goes."""
    end = _whole(text + b"a", 1, len(text))
    # Nothing else can be wrong with it than a last character that is not whole.
    content: str = _decode_string(text[:end].decode(errors="ignore") + '"')[0]
    return content


def _piece_end(data: bytes, begin: int) -> int:
    """Return where a piece of a string can end: behind its quote, or as far as a step may go."""
    limit = min(begin + _STRING_WINDOW, len(data))
    # An escaped one is passed over; if the backslash before it is escaped, `json` will see that.
    quote = find_quote(data, begin, limit)
    return _whole(data, begin, limit) if quote < 0 else quote + 1


def _whole(data: bytes, begin: int, end: int) -> int:
    """Return where a piece of a string can end, at most at `end`: within no character, escape or pair."""
    if end >= len(data):
        return len(data)
    for _ in range(3):
        if data[end] & 0xC0 == 0x80:
            end -= 1
    slash = data.rfind(b"\\", max(begin, end - 6), end)
    if slash >= 0:
        before = data[begin : slash + 1]
        escapes = (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
        if escapes and slash + (6 if data[slash + 1 : slash + 2] == b"u" else 2) > end:
            end = slash
    # Half of a character, whose other half follows.
    half = max(begin, end - 6)
    if data.startswith(b"\\u", end) and _first_half(data, half, end) is not None:
        before = data[begin:half]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            end = half
    return end


# The text of a long string, looked at without decoding it.

# Of a shorter piece `json` is as quick; and of one with escapes.
_SHORTEST = 2_048
_SHORTEST_ESCAPED = 12_288
_GLANCE = 2_048
# The bytes that may follow a backslash and stand with it for one character; no \\u, no second backslash.
_SHORT_ESCAPES = np.zeros(256, dtype=np.bool_)
_SHORT_ESCAPES[list(b'"/bfnrt')] = True


def plain_characters(data: bytes, begin: int, end: int) -> int | None:
    """Count the characters of a piece of a string, if it is UTF-8 with the common escapes alone.

    `json` takes ten times as long, as it decodes and copies the piece.

    Args:
        data: JSON text.
        begin: Where the piece begins, not within a character or an escape.
        end: Where it ends, likewise; behind the string's closing quote, which then counts, or before.

    Returns:
        None if the piece is short, holds any other escape, or is malformed: `json` is to judge it.
    """
    if end - begin < _SHORTEST:
        return None
    escape = data.find(b"\\", begin, end)
    if escape >= 0 and end - begin < _SHORTEST_ESCAPED:
        return None
    if escape >= 0 and data.find(b"\\u", escape, min(end, escape + _GLANCE)) >= 0:
        return None  # More are to come, as a rule.
    piece = np.frombuffer(data, np.uint8, end - begin, begin)
    if piece.min() < 0x20:
        return None
    escapes = 0
    if escape >= 0:
        places = np.flatnonzero(piece == _BACKSLASH)
        if places[-1] + 1 == len(piece) or not _SHORT_ESCAPES[piece[places + 1]].all():
            return None
        escapes = len(places)
    if piece.max() < 0x80:
        return len(piece) - escapes
    try:
        return len(data[begin:end].decode()) - escapes
    except UnicodeDecodeError:
        return None


def find_quote(data: bytes, begin: int, end: int) -> int:
    """Return where the first quote stands that no backslash precedes; -1 if there is none."""
    quote = data.find(b'"', begin, end)
    window = _GLANCE
    while quote > begin and data[quote - 1] == _BACKSLASH:
        # Text may be full of them. Short windows first, as most strings are short.
        size = min(window, end - quote)
        piece = np.frombuffer(data, np.uint8, size, quote)
        quotes = np.flatnonzero((piece[1:] == _QUOTE) & (piece[:-1] != _BACKSLASH))
        if len(quotes):
            return quote + 1 + int(quotes[0])
        quote = data.find(b'"', quote + size, end)
        window = max(end - begin, window)
    return quote
