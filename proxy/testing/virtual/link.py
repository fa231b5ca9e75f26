"""What one connection's wire is like: delays, limits, and the faults planned for it."""

from dataclasses import dataclass
from enum import Enum


class Connect(Enum):
    """What becomes of a connect."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    HANG = "hang"  # No answer: the caller's timeout decides, or the kernel's after 127 s.


@dataclass(frozen=True, slots=True)
class Link:
    """The wire of the connections to one listener.

    Download is towards the side that connected (answers), upload towards the side that accepted.

    Attributes:
        latency_s: One-way delay of every byte.
        jitter_s: Each segment is up to this much later still, drawn uniformly; order is kept.
        bytes_per_s: Line rate of each direction; None is infinite.
        window_bytes: What one direction holds, in flight or arrived and not read by the peer;
            beyond it a write stays in the writer's buffer.
        split_bytes: Segments are cut in pieces of 1 to this many bytes, drawn uniformly, each
            delivered by itself. None: a segment is what one write handed over, and segments
            that arrived before the reader looks are read as one.
        coalesce_s: Segments arrive only at multiples of this, those of one period together.
        connect: What becomes of a connect.
        reset_after_download_bytes: Reset the connection once this many bytes were read.
        reset_after_upload_bytes: The same, of the other direction.
        stall_after_download_bytes: Deliver nothing, no FIN and no RST either, once this many bytes
            were read.
        stall_after_upload_bytes: The same, of the other direction.
        stall_s: How long such a stall lasts; None is for ever.
    """

    latency_s: float = 50e-6
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    window_bytes: int = 65_536
    split_bytes: int | None = None
    coalesce_s: float = 0.0
    connect: Connect = Connect.ACCEPT
    reset_after_download_bytes: int | None = None
    reset_after_upload_bytes: int | None = None
    stall_after_download_bytes: int | None = None
    stall_after_upload_bytes: int | None = None
    stall_s: float | None = None

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.jitter_s < 0 or self.coalesce_s < 0:
            raise ValueError(f"a delay is negative: {self}")
        if self.window_bytes < 1 or (self.split_bytes is not None and self.split_bytes < 1):
            raise ValueError(f"a window or a split is under one byte: {self}")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"a line rate is not positive: {self}")
