"""One small exchange as a coroutine: probes, scrapes, health checks, admin calls."""

import asyncio
from io import BytesIO

from balanceroute.proxy.wire.caller import Caller, Calling
from balanceroute.proxy.wire.messages import Headers, Response, WireError, WireFault


class _Collector:
    """Collects a response."""

    __slots__ = ("_body", "_cut", "_max_bytes", "_status", "call", "headers", "result")

    call: Calling

    def __init__(self, result: "asyncio.Future[Response]", max_bytes: int, *, cut: bool) -> None:
        self.result = result
        self.headers: Headers = []
        self._status = 0
        self._body = BytesIO()
        self._max_bytes = max_bytes
        self._cut = cut

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self.headers = headers

    def on_data(self, data: bytes) -> None:
        self._body.write(data)
        if self._body.tell() > self._max_bytes:
            self.call.abort()
            if self._cut:
                self.on_end()
                return
            message = f"a response is larger than {self._max_bytes} bytes"
            self.on_error(WireError(WireFault.TOO_LARGE, message, sent=True, answered=True))

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
) -> Response:
    """Make one exchange and return its response, whatever its status.

    Args:
        endpoint: The engine; for the next four see `Caller.request`.
        method: In upper case.
        target: In origin form, encoded.
        headers: Without Host.
        body: Possibly empty.
        timeout_s: Until the response is complete, including the connection.
        max_bytes: Limit of the response's body.
        cut: Whether a longer body is cut; otherwise it is an error.

    Raises:
        WireError: There was no complete response (TIMEOUT: not in time).
        UnsafeHeaderError: The request cannot be written.
    """
    collector = _Collector(asyncio.get_running_loop().create_future(), max_bytes, cut=cut)
    call = collector.call = endpoint.request(method, target, headers, body, collector)
    try:
        async with asyncio.timeout(timeout_s):
            return await collector.result
    except TimeoutError:
        sent, answered = call.sent, call.answered
    finally:
        call.abort()
        # The call refers to the collector, and an error to this frame. What is left in a cycle waits for
        # the garbage collector, which counts objects and not the bytes of their pages.
        del collector.call, collector, call
    # Outside of the handler: a timeout refers to the task, which may keep this error.
    message = f"no complete response from {endpoint.name} within {timeout_s} s"
    raise WireError(WireFault.TIMEOUT, message, sent=sent, answered=answered)
