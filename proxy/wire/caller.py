"""What requests are sent through, whatever the version of HTTP."""

from typing import Protocol

from balanceroute.proxy.wire.messages import Headers, WireError


class ResponseHandler(Protocol):
    """Receives one response. Nothing is called within `Caller.request`, nor after an abort."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Process the head of the final response."""

    def on_data(self, data: bytes) -> None:
        """Process payload without framing; called once per segment that contains some."""

    def on_end(self) -> None:
        """Note that the response is complete; the last call."""

    def on_error(self, error: WireError) -> None:
        """Note that the exchange failed; the last call."""


class LineHandler(ResponseHandler, Protocol):
    """Receives the events of a stream as lines, too.

    Attributes:
        takes_lines: Whether it does at present.
    """

    takes_lines: bool

    def on_line(self, line: bytes) -> None:
        """Process, instead of by `on_data`, an event of one line, without the blank line behind it."""

    def on_lines(self, lines: list[bytes]) -> None:
        """Process several such events that came together."""


class Calling(Protocol):
    """One exchange in flight."""

    @property
    def sent(self) -> bool:
        """Whether bytes of the request were written."""

    @property
    def answered(self) -> bool:
        """Whether any byte of a response arrived."""

    def abort(self) -> None:
        """End it; nothing more is called."""


class Caller(Protocol):
    """Sends requests to one address."""

    @property
    def name(self) -> str:
        """The URL, for messages."""

    def request(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, handler: ResponseHandler
    ) -> Calling:
        """Begin an exchange.

        Args:
            method: In upper case.
            target: In origin form, encoded.
            headers: Without Host, and without those that frame the message.
            body: Possibly empty.
            handler: Receives the response, never before this returns.

        Raises:
            UnsafeHeaderError: A header, the method or the target cannot be written.
        """

    def close(self) -> None:
        """Close what is idle; the rest closes with its exchange."""
