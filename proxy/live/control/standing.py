"""What administrators have made of the settings, kept for the scheduler process that is started next.

A scheduler process that dies is replaced by one that reads the settings; what was ordered since then is
in none of them.
"""

import logging
from pathlib import Path
from typing import Protocol

from msgspec import DecodeError, Struct
from msgspec.json import decode, encode

from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer

_log = logging.getLogger(__name__)


class Standing(Struct, frozen=True):
    """The engines and the policy, as they were ordered.

    Attributes:
        draining: The engines to which nothing new goes.
    """

    policy: str
    prefillers: tuple[PrefillServer, ...]
    decoders: tuple[DecodeServer, ...]
    draining: tuple[Target, ...] = ()


class Keeper(Protocol):
    """Outlives a scheduler process."""

    def read(self) -> bytes:
        """Return what was written last; empty for nothing. Raises OSError."""

    def write(self, data: bytes) -> None:
        """Keep this in place of what is there. Raises OSError."""


class KeepingFile:
    """Keeps it in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """Return the file's content; empty if there is none."""
        return self._path.read_bytes() if self._path.exists() else b""

    def write(self, data: bytes) -> None:
        """Write the file, whole or not at all."""
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(data)
        new.replace(self._path)


def load(keeper: Keeper | None, settings: Standing) -> Standing:
    """Return what was kept, else the settings."""
    try:
        kept = b"" if keeper is None else keeper.read()
        return decode(kept, type=Standing) if kept else settings
    except (OSError, DecodeError) as error:
        _log.error("orders are lost", extra={"fields": {"reason": str(error)}})
        return settings


def save(keeper: Keeper, standing: Standing) -> None:
    """Keep it."""
    try:
        keeper.write(encode(standing))
    except OSError as error:
        _log.error("orders are not kept", extra={"fields": {"reason": str(error)}})
