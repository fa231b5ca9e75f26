"""What the engines of a fleet share."""

import asyncio
import random
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol
from uuid import UUID

from balanceroute.proxy.lab.emulate.barrier import Barrier
from balanceroute.proxy.lab.emulate.connectors import KvSource
from balanceroute.proxy.lab.emulate.leases import LeaseBook
from balanceroute.proxy.lab.emulate.lengths import Lengths
from balanceroute.proxy.lab.emulate.poster import HttpPoster
from balanceroute.proxy.lab.emulate.settings import EmulationSettings


class Control(Protocol):
    """The fleet, as its engines' `/emulation` endpoints use it."""

    def handle(self, method: bytes, name: str, body: bytes) -> tuple[int, object]:
        """Return status and JSON of a request to `/emulation/<name>`."""
        ...


@dataclass(slots=True)
class Hub:
    """What the engines of a fleet share.

    Attributes:
        rng: For ids and faults.
        epoch_s: Unix time at 0 of the event loop's clock.
        sources: The prefillers, including dead ones.
        control: Answers requests below `/emulation`.
        lengths: The lengths of the answers to named requests.
    """

    settings: EmulationSettings
    rng: random.Random
    epoch_s: float
    barrier: Barrier
    poster: HttpPoster
    control: Control
    book: LeaseBook = field(default_factory=LeaseBook)
    sources: list[KvSource] = field(default_factory=list)
    lengths: Lengths = field(default_factory=Lengths)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _date: tuple[int, bytes] = (-1, b"")

    @property
    def unix_s(self) -> int:
        """The Unix time in seconds."""
        return int(self.epoch_s + self.loop.time())

    def date(self) -> bytes:
        """Return the value of a Date header."""
        now = self.unix_s
        if self._date[0] != now:
            self._date = now, formatdate(now, usegmt=True).encode()
        return self._date[1]

    def hexadecimal(self, digits: int) -> str:
        """Return random digits."""
        return f"{self.rng.getrandbits(4 * digits):0{digits}x}"

    def uuid(self) -> str:
        """Return a random id, in the form of vLLM's engine ids."""
        return str(UUID(int=self.rng.getrandbits(128), version=4))
