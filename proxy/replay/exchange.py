"""One replayed request on the wire: from the connection's callbacks to the recorder's samples."""

import asyncio
from collections.abc import Callable

from balanceroute.proxy.replay.answer import AnswerReader
from balanceroute.proxy.replay.faults import TIMEOUT, Fault, from_status, from_wire, shown
from balanceroute.proxy.replay.recorder import Recorder
from balanceroute.proxy.replay.sample import Sample
from balanceroute.proxy.wire.caller import Caller, Calling
from balanceroute.proxy.wire.messages import Headers, WireError, first_value

# The part of an error's body that is kept for the message.
_ERROR_BYTES = 4096


class Exchange:
    """One request in flight; the connection calls `on_head`, `on_data`, and `on_end` or `on_error`.

    Args:
        sample: Its measurements.
        recorder: Records tokens and the end.
        loop: The running loop.
        clock_ns: The replay's clock.
        on_over: Called once when the request has ended, but not when it is cancelled.
    """

    __slots__ = (
        "_answer",
        "_call",
        "_clock_ns",
        "_loop",
        "_on_over",
        "_recorder",
        "_refusal",
        "_status",
        "_timer",
        "sample",
    )
    _call: Calling
    _timer: asyncio.TimerHandle

    def __init__(
        self,
        sample: Sample,
        recorder: Recorder,
        loop: asyncio.AbstractEventLoop,
        *,
        clock_ns: Callable[[], int],
        on_over: Callable[[], None],
    ) -> None:
        self.sample = sample
        self._recorder = recorder
        self._loop = loop
        self._clock_ns = clock_ns
        self._on_over = on_over
        self._answer = AnswerReader()
        self._status = 0
        self._refusal = bytearray()

    def start(
        self,
        endpoint: Caller,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        timeout_s: float,
    ) -> None:
        """Send the request.

        Args:
            endpoint: The target.
            target: The request target.
            headers: Other than host and content-length.
            body: The body.
            timeout_s: Real seconds until the answer must be complete.
        """
        self._call = endpoint.request(b"POST", target, headers, body, self)
        self._timer = self._loop.call_later(timeout_s, self._time_out)

    def cancel(self) -> None:
        """Cancel the request."""
        self._timer.cancel()
        self._call.abort()
        self._recorder.cancel(self.sample, self._clock_ns())

    def on_head(self, status: int, headers: Headers) -> None:
        """See `ResponseHandler`."""
        self._status = status
        retry_after = first_value(headers, b"retry-after")
        if retry_after is not None:
            self.sample.retry_after = shown(retry_after.decode("latin-1"))

    def on_data(self, data: bytes) -> None:
        """See `ResponseHandler`."""
        if self._status != 200:
            self._refusal += data[: _ERROR_BYTES - len(self._refusal)]
            return
        try:
            tokens = self._answer.feed(data)
        except WireError as error:
            self._call.abort()
            self._fail(from_wire(error))
            return
        if tokens:
            self._recorder.tokens(self.sample, tokens, self._clock_ns())

    def on_end(self) -> None:
        """See `ResponseHandler`."""
        if self._status != 200:
            self._fail(from_status(self._status, bytes(self._refusal)))
            return
        answer = self._answer
        fault = answer.end()
        if fault is not None:
            self._fail(fault)
            return
        self._timer.cancel()
        self._recorder.finish(
            self.sample,
            self._clock_ns(),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
        )
        self._on_over()

    def on_error(self, error: WireError) -> None:
        """See `ResponseHandler`."""
        # An error event with the cause arrived before the connection broke.
        self._fail(self._answer.fault or from_wire(error))

    def _time_out(self) -> None:
        self._call.abort()
        events = self.sample.events
        fault = Fault(TIMEOUT, f"no whole answer in time, {events} token events so far")
        self._fail(self._answer.fault or fault)

    def _fail(self, fault: Fault) -> None:
        self._timer.cancel()
        self._recorder.fail(self.sample, self._clock_ns(), fault)
        self._on_over()
