"""The text of a long JSON string, looked at without decoding it."""

import numpy as np

# Of a shorter piece `json` is as quick; and of one with escapes.
_SHORTEST = 2_048
_SHORTEST_ESCAPED = 12_288
_GLANCE = 2_048
_QUOTE, _BACKSLASH = b'"\\'
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
