"""What administrators and discovery have made of the settings, kept for the process started next.

A process that takes over reads the settings; what was ordered and found since then is in none of them.
With --roster-state it outlives the proxy.
"""

import asyncio
import logging
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from msgspec import Raw, Struct
from msgspec.json import decode, encode
from msgspec.structs import replace

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer, check_ranks
from balanceroute.topologies import MAX_RANKS

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0


class Standing(Struct, frozen=True):
    """The engines, the policy and the log level, as they were ordered, and a limit that was found.

    Attributes:
        draining: The engines to which nothing new goes.
        discovered: The engines that are here because they were found; see `Reconciler`.
        leaving: Of these, those that are drained because they are found no more.
        basis: Names the settings that it was made of.
        log_level: Empty for that of the settings.
        inflight_limit: What `--aimd` had come to, per rank; None to begin anew.
        paused: Whether no prefill may start; see `Pausing`.
        deadlines: Of those that are drained, some, with the Unix time at which they are left.
    """

    policy: str
    prefillers: tuple[PrefillServer, ...]
    decoders: tuple[DecodeServer, ...]
    draining: tuple[Target, ...] = ()
    discovered: tuple[Target, ...] = ()
    leaving: tuple[Target, ...] = ()
    basis: str = ""
    log_level: str = ""
    inflight_limit: int | None = None
    paused: bool = False
    deadlines: tuple[tuple[Target, float], ...] = ()


class Keeper(Protocol):
    """Outlives a process."""

    def read(self) -> bytes:
        """Return what was written last; empty for nothing. Raises OSError."""

    def write(self, data: bytes) -> None:
        """Keep this in place of what is there. Raises OSError; then it is `read`, but may not last."""

    def retry(self) -> bool:
        """Keep what could not be kept; return whether there was something. Raises OSError."""


class KeptHere:
    """Keeps it in this process, which tells its successor."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self) -> bytes:
        """Return what was written last."""
        return self._data

    def write(self, data: bytes) -> None:
        """Keep this."""
        self._data = data

    def retry(self) -> bool:
        """Do nothing: it is kept."""
        return False


class KeepingFile:
    """Keeps it in a file.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: bytes | None = None

    def read(self) -> bytes:
        """Return the file's content, or what is to be it; empty if there is none."""
        if self._unwritten is not None:
            return self._unwritten
        return self._path.read_bytes() if self._path.exists() else b""

    def write(self, data: bytes) -> None:
        """Write the file, whole or not at all."""
        self._unwritten = data
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_bytes(data)
            new.replace(self._path)
        except OSError:
            with suppress(OSError):  # On a full disk, half of it takes room.
                new.unlink()
            raise
        self._unwritten = None

    def retry(self) -> bool:
        """Write what could not be written."""
        if self._unwritten is None:
            return False
        self.write(self._unwritten)
        return True


class KeepingPart:
    """Keeps what is of one group, in a place that all groups have in common."""

    def __init__(self, whole: Keeper, group: str) -> None:
        self._whole = whole
        self._group = group

    def read(self) -> bytes:
        """Return what was kept of the group; empty if nothing was."""
        return bytes(self._parts().get(self._group, b""))

    def write(self, data: bytes) -> None:
        """Keep this, and what there is of other groups."""
        self._whole.write(encode(self._parts() | {self._group: Raw(data)}))

    def forget(self) -> None:
        """Keep nothing of it."""
        self._whole.write(
            encode({name: data for name, data in self._parts().items() if name != self._group})
        )

    def retry(self) -> bool:
        """Keep what could not be kept of any group."""
        return self._whole.retry()

    def _parts(self) -> dict[str, Raw]:
        data = self._whole.read()
        return decode(data, type=dict[str, Raw]) if data else {}


def load(keeper: Keeper | None, settings: Standing) -> Standing:
    """Return what was kept, else the settings; of other settings the engines that were found."""
    try:
        data = b"" if keeper is None else keeper.read()
        kept = decode(data, type=Standing) if data else settings
        room = MAX_RANKS
        for one in kept.decoders:
            check_ranks(one.url, len(one.rank_ids or (0,)), room)
            room -= len(one.rank_ids or (0,))
    except (OSError, ValueError, ConfigError) as error:
        _log.error("orders are lost", extra={"fields": {"reason": str(error)}})
        return settings
    if kept.basis == settings.basis:
        return kept
    _log.warning("orders are dropped: the settings are others than those they were given for")
    named = {Target(Role.PREFILL, one.url.base) for one in settings.prefillers}
    named |= {Target(Role.DECODE, one.url.base) for one in settings.decoders}
    found = [one for one in kept.discovered if one not in named]
    leaving = tuple(one for one in kept.leaving if one in found)
    prefillers = [one for one in kept.prefillers if Target(Role.PREFILL, one.url.base) in found]
    decoders = [one for one in kept.decoders if Target(Role.DECODE, one.url.base) in found]
    return replace(
        settings,
        prefillers=(*settings.prefillers, *prefillers),
        decoders=(*settings.decoders, *decoders),
        draining=leaving,
        discovered=tuple(found),
        leaving=leaving,
        paused=kept.paused,  # No setting says anything else.
    )


def basis_of(*settings: object) -> str:
    """Return a name of settings, which differs when they do."""
    return sha256(encode(settings)).hexdigest()


def save(keeper: Keeper, standing: Standing) -> None:
    """Keep it."""
    try:
        keeper.write(encode(standing))
    except (OSError, ValueError) as error:
        _log.error("orders are not kept", extra={"fields": {"reason": str(error)}})


async def keep_trying(keeper: Keeper) -> None:
    """Keep what could not be kept, as on a full disk, as soon as that can be; for ever."""
    while True:
        await asyncio.sleep(_AGAIN_S)
        with suppress(OSError):  # It was told when it was ordered.
            if keeper.retry():
                _log.info("orders are kept again")
