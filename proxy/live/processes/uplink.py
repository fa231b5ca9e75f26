"""A relay's way to the scheduler process, which may be gone for a while."""

from collections.abc import Callable, Iterable, Sequence

from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.processes.outbox import Outbox

# What is told late rather than never. All else follows from where each request is when the scheduler
# process is back.
_KEPT = (
    from_relay.SessionEnded,
    from_relay.Recorded,
    from_relay.LegRetried,
    from_relay.Failure,
)
MAX_KEPT = 10_000
"""Of them: more are dropped, the newest first."""


def _no() -> bool:
    return False


class Uplink:
    """Sends messages, or keeps those that matter later too.

    Args:
        call_soon: The loop's.
        call_later: The loop's.
        limited: Whether there are tenants. A client that has its answer may come again at once, and by
            another relay: what it may have at a time is to be known by then.

    Attributes:
        send_end: Sends the end of a request, at once if `limited`, else as `send_late` does.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: Callable[[float, Callable[[], None]], object],
        *,
        limited: bool = False,
    ) -> None:
        self.send_end = self.send if limited else self.send_late
        self._call_soon = call_soon
        self._call_later = call_later
        self._write: Callable[[Sequence[from_relay.FromRelay]], None] | None = None
        self._out: Outbox[from_relay.FromRelay] | None = None
        self._kept: list[from_relay.FromRelay] = []
        self._behind: Callable[[], bool] = _no

    @property
    def connected(self) -> bool:
        """Whether there is a scheduler process that listens."""
        return self._out is not None

    @property
    def behind(self) -> bool:
        """Whether the scheduler process reads too slowly for what can wait."""
        return self._behind()

    def send(self, message: from_relay.FromRelay) -> None:
        """Send a message, now or later."""
        if self._out is not None:
            self._out.send(message)
        else:
            self._keep(message)

    def send_late(self, message: from_relay.FromRelay) -> None:
        """Send a message that nobody waits for; see `Outbox.send_late`."""
        if self._out is not None:
            self._out.send_late(message)
        else:
            self._keep(message)

    def flush(self) -> None:
        """Send what there is to say at once."""
        if self._out is not None:
            self._out.flush()

    def connect(
        self,
        write: Callable[[Sequence[from_relay.FromRelay]], None],
        hello: from_relay.Hello,
        behind: Callable[[], bool] = _no,
    ) -> None:
        """Greet a scheduler process; everything else waits for its answer. See `Channel.behind`."""
        self._write, self._behind = write, behind
        write((hello,))

    def open(self, first: Iterable[from_relay.FromRelay]) -> None:
        """Speak to the scheduler process: first the given messages, then those that were kept."""
        assert self._write is not None
        out = self._out = Outbox(self._call_soon, self._call_later, self._write)
        for message in (*first, *self._kept):
            out.send(message)
        self._kept.clear()

    def close(self) -> None:
        """Note that the scheduler process is gone."""
        out, self._out, self._write = self._out, None, None
        if out is not None:
            for message in out.close():
                self._keep(message)

    def _keep(self, message: from_relay.FromRelay) -> None:
        if isinstance(message, _KEPT) and len(self._kept) < MAX_KEPT:
            self._kept.append(message)
