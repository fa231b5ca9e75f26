"""Faults of what the proxy's machine gives it: descriptors, names of engines, a disk, and files of keys."""

import asyncio
import random
import socket
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import DecodeError
from msgspec.json import decode
from tests.support.virtual.addresses import Connect, Link

if TYPE_CHECKING:
    from tests.support.virtual.loop import VirtualLoop

# Addresses without a server: the one is silent, at the other the host refuses.
_SILENT, _REFUSING = "127.9.0.1", "127.9.0.2"
_LOOK_S = 0.5
_CROWD_PORT = 20_000


class Naming(Enum):
    """What a resolver answers for the name of an engine."""

    WELL = "well"
    FAILS = "its name does not resolve"
    GONE = "its name does not exist"
    SILENT = "its resolver is silent"
    SILENT_TOO = "its name has a silent address too"
    REFUSING_TOO = "its name has an address too that refuses"
    ELSEWHERE = "its name points elsewhere"
    FLAPS = "its name flaps"


class Spoiling(Enum):
    """What is wrong with a file of a key."""

    EMPTY = "empty"
    HALF = "half of a line"
    MISSING = "missing"


class EngineName:
    """A name of an engine, as a resolver knows it.

    Args:
        loop: Whose names they are.
        name: The name.
        host: Where the engine is.
        port: Its port.
        rng: Decides what a name that flaps has.
    """

    def __init__(
        self, loop: "VirtualLoop", name: str, host: str, port: int, rng: random.Random
    ) -> None:
        self.naming = Naming.WELL  # What is answered now.
        self._host, self._rng = host, rng
        loop.names[name] = self.resolve
        loop.network.rule(_SILENT, port, Link(connect=Connect.HANG))

    async def resolve(self) -> Sequence[str]:
        """Return the addresses. Raises socket.gaierror."""
        while self.naming is Naming.SILENT:  # noqa: ASYNC110 - nothing waits but this.
            await asyncio.sleep(_LOOK_S)
        naming = self.naming
        if naming is Naming.FLAPS:
            kinds = [one for one in Naming if one not in (Naming.SILENT, Naming.FLAPS)]
            naming = self._rng.choice(kinds)
        match naming:
            case Naming.FAILS:
                raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
            case Naming.GONE:
                raise socket.gaierror(socket.EAI_NONAME, "name or service not known")
            case Naming.SILENT_TOO:
                return [_SILENT, self._host]
            case Naming.REFUSING_TOO:
                return [_REFUSING, self._host]
            case Naming.ELSEWHERE:
                return [_REFUSING]
            case _:
                return [self._host]


class KeyFile:
    """The file of the engines' key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._generation = 0
        self.renew()

    def renew(self) -> None:
        """Write another key."""
        self._generation += 1
        self.path.write_text(f"key-{self._generation}\n")
        self.path.chmod(0o600)

    def spoil(self, spoiling: Spoiling) -> None:
        """Leave something else there."""
        match spoiling:
            case Spoiling.EMPTY:
                self.path.write_text("")
            case Spoiling.HALF:
                self.path.write_text("key of\0")
            case Spoiling.MISSING:
                self.path.unlink(missing_ok=True)


class Crowd:
    """A file of engines in which, for a while, there are very many: half are silent, half refuse."""

    def __init__(self, loop: "VirtualLoop", path: Path) -> None:
        self.path = path  # Of the file.
        self._loop = loop
        self.go()

    def come(self, engines: int) -> None:
        """Offer so many engines."""
        lines = []
        for number in range(engines):
            host, port = (_SILENT, _REFUSING)[number % 2], _CROWD_PORT + number
            self._loop.network.rule(_SILENT, port, Link(connect=Connect.HANG))
            role = ("prefill", "decode")[number // 2 % 2]
            lines.append(f'[[{role}]]\nurl = "http://{host}:{port}"\n')
        self.path.write_text("".join(lines))

    def go(self) -> None:
        """Offer none."""
        self.path.write_text("")

    def registered(self, urls: Iterable[str]) -> list[str]:
        """Return those of some engines that are not there."""
        return [url for url in urls if f"//{_SILENT}:" in url or f"//{_REFUSING}:" in url]


class Disk:
    """A folder that may take nothing for a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "private"
        self._folder.mkdir(mode=0o700)
        self.orders = self._folder / "orders"
        self._obstacle = self._folder / "orders.new"
        self._failed = False

    def fill(self) -> None:
        """Take nothing from now on: where the file is to be written first, there is a folder."""
        self._obstacle.mkdir(exist_ok=True)
        self._failed = True

    def free(self) -> None:
        """Take everything again."""
        if self._obstacle.is_dir():
            self._obstacle.rmdir()

    def explains(self, message: str) -> bool:
        """Return whether an error that was logged was to be expected."""
        return self._failed and message == "orders are not kept"

    def audit(self, policy: str) -> list[str]:
        """Return whether what was ordered last is not kept although there was time."""
        if not self._failed:
            return []
        try:
            kept = decode(self.orders.read_bytes())["policy"]
        except (OSError, DecodeError, KeyError) as error:
            return [f"disk: no order is kept: {error!r}"]
        return [] if kept == policy else [f"disk: policy {kept} is kept, not {policy}"]


class Machine:
    """What the proxy has of its machine.

    Args:
        loop: Where its engines are found.
        folder: On its disk.

    Attributes:
        disk: What keeps orders.
        key_file: Has the engines' key.
    """

    def __init__(self, loop: "VirtualLoop", folder: Path) -> None:
        self.lacks_descriptors = False  # Whether the proxy can open no connection.
        self.crowd = Crowd(loop, folder / "engines.toml")  # Where engines are found.
        self.disk, self.key_file = Disk(folder), KeyFile(folder / "key")
        self.wrongs: list[str] = []  # What must not be.
