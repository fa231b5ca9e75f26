"""What the connections of one network share."""

import asyncio
import random
from typing import NamedTuple


class NetworkEvent(NamedTuple):
    """One line of the journal.

    Attributes:
        time_s: Virtual time.
        kind: connect, accept, refused, unreachable, bytes, eof, reset or closed.
        connection: Its number; 0 for a connect that failed.
        end: "client" or "server": who noticed.
        num_bytes: Bytes delivered, or 0.
    """

    time_s: float
    kind: str
    connection: int
    end: str
    num_bytes: int


class Traffic:
    """The clock, the random numbers, the counters and the journal of one network.

    Attributes:
        loop: Its clock and its timers.
        rng: Draws delays, splits and losses; nothing else does.
        abort_resets: Whether abort() sends a reset, as with SO_LINGER 0. False is what Linux does
            by default: a FIN, unless bytes that arrived were not read.
        open_connections: Ends of connections that have a protocol and are not lost: a connection
            open at both ends counts two.
        bytes_sent: Bytes taken from writers.
        bytes_delivered: Bytes given to readers.
        journal: What happened, if asked for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        abort_resets: bool,
        journal: bool,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.abort_resets = abort_resets
        self.open_connections = 0
        self.bytes_sent = 0
        self.bytes_delivered = 0
        self.journal: list[NetworkEvent] | None = [] if journal else None

    def record(self, kind: str, connection: int, end: str, num_bytes: int = 0) -> None:
        """Write a line of the journal, if there is one; see `NetworkEvent`."""
        if self.journal is not None:
            self.journal.append(NetworkEvent(self.loop.time(), kind, connection, end, num_bytes))
