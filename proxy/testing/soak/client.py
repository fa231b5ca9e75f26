"""A client's connection, which reads carefully and leaves as planned."""

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from typing import cast

from balanceroute.proxy.testing.soak.plans import Plan
from balanceroute.proxy.wire.chunked import ChunkedDecoder
from balanceroute.proxy.wire.heads import parse_response_head
from balanceroute.proxy.wire.messages import Headers, MalformedError

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# Who leaves within the body does so after this time, in seconds.
_IN_BODY_S = 0.02
# Longer than all of the proxy's time limits and retries together.
_HUNG_S = 45.0


@dataclass(slots=True)
class Seen:
    """What a client saw of its answer.

    Attributes:
        status: 0 if no head came.
        headers: Of the answer.
        body: Without its framing.
        complete: Whether the whole answer came.
        left: Whether the client left before that.
        hung: Whether it gave up, because nothing ended the answer.
        malformed: What was not HTTP; empty if all was.
        ending: How the connection ended, if it did.
    """

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    left: bool = False
    hung: bool = False
    malformed: str = ""
    ending: str = ""


class Connection(asyncio.Protocol):
    """One connection; it carries one request at a time.

    Attributes:
        closed: Whether it can carry no more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._plan: Plan
        self._seen = Seen()
        self._over: asyncio.Future[None] | None = None
        self._head = b""
        self._decoder: ChunkedDecoder | None = None
        self._missing = 0
        self._timers: list[asyncio.TimerHandle] = []

    async def perform(self, plan: Plan) -> Seen:
        """Send a request; return what came once it is over."""
        self._plan, self._seen = plan, Seen()
        self._head, self._decoder = b"", None
        self._over = self._loop.create_future()
        self._timers = [self._loop.call_later(_HUNG_S, self._give_up)]
        leaving = plan.leaving
        if leaving is not None and leaving.in_body:
            self._transport.write(plan.data[: len(plan.data) * 2 // 3])
            self._timers.append(self._loop.call_later(_IN_BODY_S, self._leave))
        else:
            self._transport.write(plan.data)
            if leaving is not None and leaving.after_s is not None:
                self._timers.append(self._loop.call_later(leaving.after_s, self._leave))
        await self._over
        return self._seen

    def close(self) -> None:
        """Close an idle connection."""
        self.closed = True
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are asyncio transports by duck typing alone.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the answer."""
        seen = self._seen
        if seen.left or self._over is None or self._over.done():
            return
        try:
            self._read(data)
        except MalformedError as error:
            seen.malformed = str(error)
            self._transport.abort()
            return
        leaving = self._plan.leaving
        if seen.complete:
            self._end()
        elif leaving is not None and leaving.after_events is not None:
            # The opening event of each choice of a chat says nothing.
            silent = len(self._plan.texts) if self._plan.chat else 0
            if seen.body.count(b"\n\n") >= leaving.after_events + silent:
                self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end."""
        self.closed = True
        self._seen.ending = str(exc) if exc else "closed"
        self._end()

    def _leave(self) -> None:
        if self.closed or self._over is None or self._over.done():
            return
        self._seen.left = True
        leaving = self._plan.leaving
        if leaving is not None and leaving.reset:
            raw = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()
        else:
            self._transport.close()

    def _give_up(self) -> None:
        self._seen.hung = True
        self._transport.abort()

    def _end(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _read(self, data: bytes) -> None:
        seen = self._seen
        if not seen.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            head = parse_response_head(self._head[:end])
            seen.status, seen.headers = head.status, head.headers
            self._decoder = ChunkedDecoder() if head.chunked else None
            self._missing = head.content_length or 0
            data = self._head[end:]
        if self._decoder is not None:
            seen.body += self._decoder.feed(data)
            seen.complete = self._decoder.finished
        else:
            seen.body += data
            self._missing -= len(data)
            seen.complete = self._missing == 0
