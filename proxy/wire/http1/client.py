"""An endpoint: the keep-alive connections to one engine address."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from io import BytesIO
from socket import EAI_NONAME, gaierror
from ssl import SSLContext
from typing import Any

from balanceroute.proxy.wire.http1.client_connection import Call, ClientConnection
from balanceroute.proxy.wire.http1.heads import encode_request_head
from balanceroute.proxy.wire.messages import (
    Caller,
    Calling,
    Headers,
    LineHandler,
    Payload,
    Response,
    ResponseHandler,
    WireError,
    WireFault,
    bracketed,
)
from balanceroute.proxy.wire.turn_writes import WriteTurn, end_if_silent

# The addresses of a host, cached for a time, and for longer while its name does not resolve.

_log = logging.getLogger(__name__)
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name. Raises OSError (socket.gaierror) or UnicodeError."""

# How long a new look-up is waited for while the last addresses are known.
_PATIENCE_S = 1.0
# How long addresses are valid.
_VALID_S = 5.0


class Addresses:
    """The addresses of one host.

    It resolves a name again after some time, to find an engine that moved. While that fails or takes long,
    it returns the last good addresses: a resolver that is down says nothing about the engine. Addresses at
    which the last attempt failed come last.
    """

    def __init__(
        self,
        host: str,
        port: int,
        loop: asyncio.AbstractEventLoop,
        *,
        resolve: Resolve | None = None,
    ) -> None:
        self.known: list[str] = []  # The last good addresses; empty if the name has never resolved.
        self._host = host
        self._port = port
        self._loop = loop
        self._resolve = resolve or self._getaddrinfo
        self._good_until_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._error: OSError | UnicodeError | None = None
        self._failing: set[str] = set()
        self._is_literal = _is_literal(host)
        if self._is_literal:
            self.known = [host]

    async def get(self) -> list[str]:
        """Return the addresses, in the order in which to try them.

        Raises:
            OSError: The name has never resolved (socket.gaierror).
            UnicodeError: The host is no valid name.
        """
        if self._is_literal or self._loop.time() < self._good_until_s:
            return self.known
        if self._asking is None:
            self._asking = self._loop.create_task(self._ask())
        # `wait` does not cancel the task with its caller: other callers may wait for it too.
        patience_s = _PATIENCE_S if self.known else None
        _, silent = await asyncio.wait([self._asking], timeout=patience_s)
        if silent:
            self._failed(TimeoutError(f"no answer within {patience_s:g} s"))
        if not self.known:
            assert self._error is not None
            raise self._error
        return self.known

    def tried(self, address: str, *, accepted: bool) -> None:
        """Note whether an address accepted a connection."""
        if accepted:
            self._failing.discard(address)
        else:
            self._failing.add(address)
        self.known = self._ordered(self.known)

    def invalidate(self) -> None:
        """Resolve again before the next connection: no address accepted this one."""
        self._good_until_s = 0.0

    async def _ask(self) -> None:
        try:
            found = await self._resolve(self._host, self._port)
            if not found:
                raise socket.gaierror(socket.EAI_AGAIN, "the name has no address")
        except (OSError, UnicodeError) as error:
            self._failed(error)
        else:
            self._failing.intersection_update(found)
            self.known, self._error = self._ordered(found), None
            self._good_until_s = self._loop.time() + _VALID_S
        finally:
            self._asking = None

    def _ordered(self, addresses: list[str]) -> list[str]:
        if not self._failing:
            return addresses
        return sorted(addresses, key=lambda one: one in self._failing)

    def _failed(self, error: OSError | UnicodeError) -> None:
        if self.known:
            self._good_until_s = self._loop.time() + _VALID_S
            if self._error is None:  # Logged once per outage.
                fields = {"host": self._host, "addresses": self.known, "reason": str(error)}
                message = "a name does not resolve; its last address is used"
                _log.warning(message, extra={"fields": fields})
        self._error = error

    async def _getaddrinfo(self, host: str, port: int) -> list[str]:
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(sockaddr[0]) for *_, sockaddr in found]


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


__all__ = ["Call", "Endpoint", "ResponseHandler"]

# So many reused connections in a row that end when a request comes are no accident.
_STALE_IN_A_ROW = 2
_NO_REUSE_S = 60.0


class Endpoint:
    """The keep-alive pool of one host and port.

    Each exchange in flight has its own connection. There is no limit: the scheduler bounds the load.
    The connection used last is reused first, so that the extra ones of a burst grow old and close. A
    request costs O(1), whatever the number of connections.

    If a reused connection closes before any byte of the response, the engine may just have closed it
    as idle. A GET or HEAD is then sent once more, on a new connection. Any other request may have had
    side effects already, so its handler decides: a new connection is opened, and if the engine takes it,
    the handler gets STALE, and the next request that connection; else the engine is gone, and it gets
    RESET. To make that rare, a connection is reused only if the kernel has received no end of it, and only
    within `idle_timeout_s`; and after two such losses in a row none is reused for a minute: some engines, or
    proxies before them, end a connection whenever a second request comes.

    Args:
        loop: By default the running one.
        ssl: For TLS; its settings determine how the engine is verified.
        host_header: By default the host and port.
        connect_timeout_s: Until a connection is open, including name resolution and TLS.
        tcp_timeout_s: Connections to a host that acknowledges nothing for this time are closed; 0 for
            the system's own limits.
        addresses: Those of the host, which other endpoints may share.
        resolve: Returns the addresses of a name; by default the loop's `getaddrinfo`.
        max_idle: Idle connections kept; more are closed.
        idle_timeout_s: How long they are kept. Below the 5 s of uvicorn, which serves vLLM, so that
            the engine rarely closes first.
        max_head_bytes: Limit of a response's head, including interim responses.
        expiry_clock: The clock of `expires_s`; by default the loop's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        ssl: SSLContext | None = None,
        host_header: bytes | None = None,
        connect_timeout_s: float = 5.0,
        tcp_timeout_s: float = 30.0,
        addresses: Addresses | None = None,
        resolve: Resolve | None = None,
        max_idle: int = 1024,
        idle_timeout_s: float = 4.0,
        max_head_bytes: int = 65_536,
        expiry_clock: Callable[[], float] | None = None,
    ) -> None:
        address = f"{bracketed(host)}:{port}"
        # The URL, for logs and metrics.
        self.name = f"{'http' if ssl is None else 'https'}://{address}"
        self._server_hostname = None if ssl is None else host
        self._port = port
        self._loop = loop or asyncio.get_running_loop()
        self.turn = WriteTurn(self._loop)  # Gathers the writes of all connections.
        self._addresses = addresses or Addresses(host, port, self._loop, resolve=resolve)
        self._ssl = ssl
        self._host_header = host_header or address.encode()
        self._connect_timeout_s = connect_timeout_s
        self._tcp_timeout_s = tcp_timeout_s
        self._max_idle = max_idle
        self._idle_timeout_s = idle_timeout_s
        self._max_head_bytes = max_head_bytes
        self._expiry_clock = expiry_clock or self._loop.time
        self.stale = 0  # How many POSTs in a row were lost with reused connections.
        self._reuse_from_s = 0.0
        self._open = 0
        self._connecting = 0
        # Since when each is idle; the longest first.
        self._idle: dict[ClientConnection, float] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def connections(self) -> int:
        return self._open + self._connecting

    @property
    def idle(self) -> int:
        return len(self._idle)

    def request(
        self,
        method: bytes,
        target: bytes,
        headers: Headers | bytes,
        body: Payload,
        handler: ResponseHandler,
        *,
        crashed: Callable[[Exception], None] | None = None,
        expires_s: float | None = None,
        lines: LineHandler | None = None,
        fresh: bool = False,
    ) -> Call:
        """Begin an exchange.

        Args:
            headers: Without Host. The endpoint frames the message itself and drops framing headers. What
                several requests have in common may be given as lines of `encode_fields`.
            handler: Receives the response, never before this returns.
            crashed: Called with the handler's exception, which ends the call; None lets it propagate.
            expires_s: From when on the request must not be written, by `expiry_clock`; None for never.
            lines: The handler, if it takes events one by one.
            fresh: Whether it goes on a connection on which no request went before.

        Raises:
            UnsafeHeaderError: A header, the method or the target cannot be written.
        """
        head = encode_request_head(method, target, self._host_header, headers, body)
        head_only = method == b"HEAD"
        repeatable = head_only or method == b"GET"
        # By place: names would cost as much again as the call.
        call = Call(head, body, handler, head_only, repeatable, crashed, expires_s, lines)
        connection = self._take_idle(fresh=fresh) if self._idle else None
        if connection is None:
            self._connect(call)
        else:
            self._begin(connection, call)
        return call

    def close(self) -> None:
        """Close idle connections; those in use close when their exchange ends."""
        self._closed = True
        self._close_idle(len(self._idle))

    def close_idle(self) -> None:
        """Close idle connections, after a response on one that does not belong to its request.

        Other idle connections may be off by one response as well.
        """
        self._close_idle(len(self._idle))

    # Called by connections.

    def opened(self) -> None:
        self._open += 1

    def lost(self, connection: ClientConnection) -> None:
        self._open -= 1
        self._idle.pop(connection, None)
        self._stop_sweep()

    def release(self, connection: ClientConnection) -> None:
        now_s = self._loop.time()
        if self._closed or len(self._idle) >= self._max_idle or now_s < self._reuse_from_s:
            connection.drop()
        else:
            self._keep(connection, now_s)

    def _keep(self, connection: ClientConnection, now_s: float) -> None:
        self._idle[connection] = now_s
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    def retry(self, call: Call) -> None:
        self._connect(call)

    def fail_stale(self, call: Call, message: str, cause: Exception | None) -> None:
        call.lost = True
        self.stale += 1
        if self.stale >= _STALE_IN_A_ROW:
            self._reuse_from_s = self._loop.time() + _NO_REUSE_S
        self._start(call, self._check(call, message, cause))

    async def _check(self, call: Call, message: str, cause: Exception | None) -> None:
        try:
            connection = await self._connect_in_time()
        except (OSError, UnicodeError) as error:
            self._addresses.invalidate()
            call.fail(WireFault.RESET, message, cause or error)
            return
        if connection.usable and not self._closed:
            connection.join()
            self._keep(connection, self._loop.time())
            call.fail(WireFault.STALE, message, cause)
        else:
            connection.drop()
            call.fail(WireFault.RESET, message, cause)

    # Sending.

    def _begin(self, connection: ClientConnection, call: Call) -> None:
        # The last moment before the write: to connect takes time, and the process may have been
        # suspended since the request was decided on.
        if call.expires_s is None or self._expiry_clock() < call.expires_s:
            connection.begin(call)
            return
        self.release(connection)
        self._loop.call_soon(self._expire, call)

    def _expire(self, call: Call) -> None:
        if not call.done:
            call.fail(WireFault.TOO_LATE, f"the request to {self.name} was not sent in time")

    # Idle connections.

    @property
    def _sweep_s(self) -> float:
        return min(1.0, self._idle_timeout_s / 4)

    def _take_idle(self, *, fresh: bool) -> ClientConnection | None:
        while self._idle:
            connection, since_s = self._idle.popitem()
            if fresh and connection.reused:
                self._idle[connection] = since_s  # One that is not would most likely come first.
                return None
            if self._loop.time() - since_s >= self._idle_timeout_s:
                connection.drop()  # The rest is older still, so the loop drops it too.
            elif connection.is_reusable():
                return connection
            else:
                connection.drop()
        return None

    def _close_idle(self, count: int) -> None:
        for connection in list(self._idle)[:count]:
            del self._idle[connection]
            connection.drop()
        self._stop_sweep()

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)
        expired_s = self._loop.time() - self._idle_timeout_s
        count = 0
        for since_s in self._idle.values():
            if since_s > expired_s:
                break
            count += 1
        self._close_idle(count)

    def _stop_sweep(self) -> None:
        """Cancel the timer if there is nothing to close."""
        if not self._idle and self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # Connecting.

    def _connect(self, call: Call) -> None:
        self._start(call, self._open_for(call))

    def _start(self, call: Call, connect: Coroutine[Any, Any, None]) -> None:
        self._connecting += 1
        task = self._loop.create_task(connect)
        task.add_done_callback(self._connected)  # Also runs if it is cancelled before it started.
        call.connection, call.connecting = None, task

    def _connected(self, _: "asyncio.Task[None]") -> None:
        self._connecting -= 1

    async def _open_for(self, call: Call) -> None:
        addresses = self._addresses
        try:
            connection = await self._connect_in_time()
        except TimeoutError:
            kind = WireFault.CONNECT_TIMEOUT if addresses.known else WireFault.NO_ADDRESS
            addresses.invalidate()
            call.fail(kind, f"no connection to {self.name} in time")
            return
        except (OSError, UnicodeError) as error:
            # EAI_NONAME is an answer: the name does not exist, so neither does the engine. Any other
            # resolver error says nothing about the engine.
            unresolved = isinstance(error, gaierror) and error.errno != EAI_NONAME
            kind = WireFault.NO_ADDRESS if unresolved else WireFault.CONNECT
            addresses.invalidate()
            call.fail(kind, f"no connection to {self.name}: {error}", error)
            return
        if connection.usable:
            connection.join()
            self._begin(connection, call)
        else:
            call.fail(WireFault.RESET, f"{self.name} closed the connection at once")

    async def _connect_in_time(self) -> ClientConnection:
        """Connect; raise TimeoutError if that takes too long.

        In two halves: a loop runs timers before it reads, so that after a standstill of this process a
        connection that the engine accepted long ago would be overdue. Between the halves the loop sees it.
        """
        half_s = self._connect_timeout_s / 2
        async with asyncio.timeout(None) as limit:
            half = self._loop.call_later(half_s, self._extend, limit, half_s)
            try:
                return await self._connect_any()
            finally:
                half.cancel()
                # It refers to the task, and the task to its cancellation, with this frame and the call's.
                del limit

    def _extend(self, limit: asyncio.Timeout, seconds: float) -> None:
        limit.reschedule(self._loop.time() + seconds)

    async def _connect_any(self) -> ClientConnection:
        end_s = self._loop.time() + self._connect_timeout_s
        errors: list[OSError] = []
        addresses = await self._addresses.get()
        share_s = (end_s - self._loop.time()) / len(addresses)
        for number, address in enumerate(addresses, start=1):
            # A silent address must not use up the time of the next ones. The last one has the rest.
            left = len(addresses) - number
            try:
                async with asyncio.timeout_at(end_s - share_s * left if left else None):
                    transport, connection = await self._loop.create_connection(
                        lambda: ClientConnection(self, self._max_head_bytes),
                        address,
                        self._port,
                        ssl=self._ssl,
                        server_hostname=self._server_hostname,
                    )
            except OSError as error:
                errors.append(error.with_traceback(None))
                self._addresses.tried(address, accepted=False)
            else:
                self._addresses.tried(address, accepted=True)
                if connection.usable:
                    end_if_silent(transport.get_extra_info("socket"), self._tcp_timeout_s)
                return connection
        # "Refused" is definite, so it is reported only if every address refused.
        raise next(
            (error for error in errors if not isinstance(error, ConnectionRefusedError)), errors[0]
        )


# One small exchange as a coroutine: probes, scrapes, health checks, admin calls.


class ResponseRoom:
    """Bounds the bytes of the responses that are being collected at a time.

    At the limit the longest one ends, so that long responses take no room of short ones.
    """

    __slots__ = ("_collectors", "_limit_bytes", "held")

    def __init__(self, limit_bytes: int) -> None:
        self.held = 0  # Bytes that have come of them.
        self._limit_bytes = limit_bytes
        self._collectors: dict[_Collector, None] = {}

    def take(self, collector: "_Collector", size: int) -> None:
        self._collectors[collector] = None
        self.held += size
        while self.held > self._limit_bytes:
            longest = max(self._collectors, key=lambda one: one.size)
            longest.end(f"responses are larger than {self._limit_bytes} bytes together")

    def release(self, collector: "_Collector") -> None:
        if collector in self._collectors:
            del self._collectors[collector]
            self.held -= collector.size


class _Collector:
    __slots__ = ("_body", "_cut", "_max_bytes", "_room", "_status", "call", "headers", "result")

    call: Calling

    def __init__(
        self,
        result: "asyncio.Future[Response]",
        max_bytes: int,
        *,
        cut: bool,
        room: ResponseRoom | None,
    ) -> None:
        self.result = result
        self.headers: Headers = []
        self._status = 0
        self._body = BytesIO()
        self._max_bytes = max_bytes
        self._cut = cut
        self._room = room

    @property
    def size(self) -> int:
        """Bytes of the body so far."""
        return self._body.tell()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self.headers = headers

    def on_data(self, data: bytes) -> None:
        self._body.write(data)
        if self._room is not None:
            self._room.take(self, len(data))
        if self.size > self._max_bytes:
            self.end(f"a response is larger than {self._max_bytes} bytes")

    def end(self, reason: str) -> None:
        """Take nothing more, and keep nothing: it is too long."""
        self.call.abort()
        if self._cut:
            self.on_end()
        else:
            self.on_error(WireError(WireFault.TOO_LARGE, reason, sent=True, answered=True))
        if self._room is not None:
            self._room.release(self)
        self._body = BytesIO()

    def on_end(self) -> None:
        if not self.result.done():
            self.result.set_result(Response(self._status, self.headers, self._body.getvalue()))

    def on_error(self, error: WireError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


async def fetch(
    endpoint: Caller,
    method: bytes,
    target: bytes,
    headers: Headers,
    body: bytes,
    *,
    timeout_s: float,
    max_bytes: int,
    cut: bool = False,
    room: ResponseRoom | None = None,
) -> Response:
    """Make one exchange and return its response, whatever its status.

    Args:
        timeout_s: Until the response is complete, including the connection.
        max_bytes: Limit of the response's body.
        cut: Whether a longer body is cut; otherwise it is an error.
        room: Bounds it together with other responses.

    Raises:
        WireError: There was no complete response (TIMEOUT: not in time).
        UnsafeHeaderError: The request cannot be written.
    """
    result: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    collector = _Collector(result, max_bytes, cut=cut, room=room)
    call = collector.call = endpoint.request(method, target, headers, body, collector)
    try:
        async with asyncio.timeout(timeout_s):
            return await result
    except TimeoutError:
        sent, answered = call.sent, call.answered
    finally:
        call.abort()
        if room is not None:
            room.release(collector)
        # The call refers to the collector, and an error to this frame. A cycle would wait for the garbage
        # collector, which counts objects and not the bytes of their pages.
        del collector.call, collector, call, result
    # Outside of the handler: a timeout refers to the task, which may keep this error.
    message = f"no complete response from {endpoint.name} within {timeout_s} s"
    raise WireError(WireFault.TIMEOUT, message, sent=sent, answered=answered)
