"""The heads of one connection's requests, most of which say again what the one before them said."""

import re

from msgspec.structs import replace

from balanceroute.proxy.wire.http1.heads import RequestHead, parse_request_head

# As most clients write it. A head in which it is written otherwise is parsed each time.
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,18})\r\n")

# A connection keeps up to seven times as much while it is idle.
_LONGEST_KEPT = 4096


class RepeatedHead:
    """Parses heads; one that differs from the last by the length of the body alone is not parsed again.

    Long heads are parsed each time. Nobody may change the headers that it returns. What was learned of the
    last head goes on with it.
    """

    __slots__ = ("_head", "_length", "_text")

    def __init__(self) -> None:
        self._text = b""
        self._length = 0, 0  # Where its digits begin and end; nowhere at first.
        self._head: RequestHead | None = None

    def parse(self, text: bytes, *, max_target_bytes: int, max_headers: int) -> RequestHead:
        """Return what `parse_request_head` does.

        Raises:
            MalformedError: See there.
        """
        head = self._head
        if head is not None and text == self._text:
            return head
        found = _LENGTH.search(text)
        begin, end = (0, 0) if found is None else found.span(1)
        before, behind = self._length
        if (
            head is not None
            and found is not None
            and (begin, text[:begin], text[end:])
            == (before, self._text[:before], self._text[behind:])
        ):
            headers = [
                (name, found[1] if name == b"content-length" else value)
                for name, value in head.headers
            ]
            head = replace(head, headers=headers, content_length=int(found[1]))
        else:
            head = parse_request_head(
                text, max_target_bytes=max_target_bytes, max_headers=max_headers
            )
        if len(text) <= _LONGEST_KEPT:
            self._text, self._length, self._head = text, (begin, end), head
        else:
            self._text, self._length, self._head = b"", (0, 0), None
        return head
