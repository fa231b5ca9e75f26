"""What one process of several is told when it starts, and what it tells the supervisor."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.json import decode, encode

from balanceroute.proxy.core.errors import ConfigError

READY = b"ready\n"
"""What a process writes to its standard output when it serves; then it writes anything every `BEAT_S`."""

BEAT_S = 1.0
HANG_S = 10.0
"""A process that stands still for so long is replaced."""


class Part(Struct, frozen=True, omit_defaults=True):
    """One process of several.

    Attributes:
        role: What it does.
        path: The Unix socket at which the scheduler process listens for relays.
        listeners: Descriptors of listening sockets, inherited: a relay's are for clients, the
            scheduler process's for administrators.
        relays: How many relays there are.
        relay: Which relay it is, from 0.
        others: A relay's inherited descriptors of the sockets of each other relay.
        engines: The URLs of the engines that `up` has started, by flag.
        topology: A copy of the topology file, as it was when the first of its siblings started; empty
            for none.
    """

    role: Literal["scheduler", "relay"]
    path: str
    listeners: tuple[int, ...]
    relays: int
    relay: int = 0
    others: dict[int, tuple[int, ...]] = {}
    engines: dict[str, object] = {}
    topology: str = ""

    @property
    def name(self) -> str:
        """What logs and metrics call it."""
        return f"relay-{self.relay}" if self.role == "relay" else self.role

    @property
    def inherited(self) -> tuple[int, ...]:
        """Every descriptor that it inherits."""
        return (*self.listeners, *chain(*self.others.values()))

    def word(self) -> str:
        """Return it as one word of a command line."""
        return encode(self).decode()

    @classmethod
    def read(cls, word: str) -> "Part":
        """Return what `word` was made of.

        Raises:
            ConfigError: It is none.
        """
        try:
            return decode(word, type=cls)
        except ValueError as error:
            raise ConfigError(f"--process: {error}") from None


def orders_beside(path: Path) -> Path:
    """Return the file of what was ordered (`standing.py`) of the processes whose socket is at `path`."""
    return path.with_name(f"{path.name}.orders")


async def tell_alive() -> None:
    """Tell the supervisor that this process serves, and every second that it does not stand still."""
    sys.stdout.flush()
    pipe = os.dup(1)
    os.dup2(2, 1)  # Nobody reads what else may be printed.
    os.set_blocking(pipe, False)  # The supervisor may stand still.
    said = READY
    try:
        while True:
            with suppress(OSError):
                os.write(pipe, said)
            said = b"."
            await asyncio.sleep(BEAT_S)
    finally:
        os.close(pipe)


def gone_word(relays: Iterable[int]) -> bytes:
    """Return what tells a relay which of the others are gone."""
    return encode(list(relays)) + b"\n"


async def supervisor_gone(relays_gone: Callable[[list[int]], None]) -> None:
    """Wait until the supervisor has died: its end of this process's standard input is closed.

    Args:
        relays_gone: Called with all relays that are gone, whenever the supervisor tells of them.
    """
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    rest = b""

    def read() -> None:
        nonlocal rest
        data = os.read(0, 1024)
        if data:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                relays_gone(decode(line, type=list[int]))
            return
        loop.remove_reader(0)
        if not gone.done():
            gone.set_result(None)

    loop.add_reader(0, read)
    try:
        await gone
    finally:
        loop.remove_reader(0)
