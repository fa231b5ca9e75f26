"""A thin link: a rate, a delay, losses from a seed, and a queue in front of it."""

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ThinLinkSettings:
    """One direction of a link.

    Attributes:
        bits_per_s: Its rate.
        delay_s: From the end of a packet's transmission to its arrival.
        loss: The probability that a packet is lost on its way.
        queue_bytes: What waits for transmission at most; more is dropped.
        overhead_bytes: What the link carries of each packet beside its payload: for UDP over IPv4, 28.
    """

    bits_per_s: float = 5e6
    delay_s: float = 0.025
    loss: float = 0.005
    queue_bytes: int = 64_000
    overhead_bytes: int = 28


class ThinLink:
    """One direction of a link; it knows no clock and sends nothing.

    Attributes:
        carried: Packets that arrive.
        lost: Packets lost on their way.
        dropped: Packets that found the queue full.
    """

    def __init__(self, settings: ThinLinkSettings, rng: random.Random) -> None:
        self.carried = self.lost = self.dropped = 0
        self._settings = settings
        self._rng = rng
        self._free_s = 0.0

    def heal(self) -> None:
        """Lose nothing on the way any more."""
        self._settings = replace(self._settings, loss=0.0)

    def offer(self, size: int, now_s: float) -> float | None:
        """Return when a packet of so many bytes arrives; None if it never does."""
        settings = self._settings
        begin_s = max(now_s, self._free_s)
        if (begin_s - now_s) * settings.bits_per_s / 8 + size > settings.queue_bytes:
            self.dropped += 1
            return None
        self._free_s = begin_s + 8 * (size + settings.overhead_bytes) / settings.bits_per_s
        if self._rng.random() < settings.loss:
            self.lost += 1
            return None
        self.carried += 1
        return self._free_s + settings.delay_s
