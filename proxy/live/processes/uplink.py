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
    """Sends messages, or keeps those that matter later too."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
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
        elif isinstance(message, _KEPT) and len(self._kept) < MAX_KEPT:
            self._kept.append(message)

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
        out = self._out = Outbox(self._call_soon, self._write)
        for message in (*first, *self._kept):
            out.send(message)
        self._kept.clear()

    def close(self) -> None:
        """Note that the scheduler process is gone."""
        if self._out is not None:
            self._out.close()
        self._out = self._write = None
