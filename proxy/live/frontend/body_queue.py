"""The large bodies that are being read: a slice at a time, and all of them in turn.

Neither one body of many megabytes nor many of them at a time may hold the event loop for long: it also
relays every stream.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Protocol

from balanceroute.proxy.live.openai.body import SMALL_BYTES, BodyError, RequestBody, read_in_slices

Done = Callable[[RequestBody | BodyError], None]
_Reading = Generator[None, None, RequestBody]


class Waiting(Protocol):
    """Who waits for a body.

    Attributes:
        closed: The client is gone.
    """

    closed: bool


def read_at_once(data: bytes) -> RequestBody | BodyError:
    """Read a body that is small."""
    try:
        return RequestBody(data)
    except BodyError as error:
        return _told(error)


def _told(error: BodyError) -> BodyError:
    """Return an error that is handed on: its traceback would keep the body, and frames that keep it."""
    error.__context__ = None
    return error.with_traceback(None)


class BodyQueue:
    """Reads bodies."""

    def __init__(self) -> None:
        self._queue: deque[tuple[_Reading, Waiting, Done]] = deque()
        self._scheduled = False

    def read(self, data: bytes, waiting: Waiting, done: Done, *, hashed: bool = False) -> None:
        """Read a body; call `done`, at once if it is small, and not if the client is gone."""
        if len(data) > SMALL_BYTES:
            self._read_on(read_in_slices(data, hashed=hashed), waiting, done)
        else:
            done(read_at_once(data))

    def _read_on(self, reading: _Reading, waiting: Waiting, done: Done) -> None:
        result: RequestBody | BodyError
        try:
            next(reading)
        except StopIteration as end:
            result = end.value
        except BodyError as error:
            result = _told(error)
        else:
            self._queue.append((reading, waiting, done))
            if not self._scheduled:
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self._next)
            return
        done(result)

    def _next(self) -> None:
        """Read one slice of the body whose turn it is."""
        self._scheduled = False
        reading, waiting, done = self._queue.popleft()
        if self._queue:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)
        if not waiting.closed:
            self._read_on(reading, waiting, done)
