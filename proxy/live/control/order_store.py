"""Orders of administrators, and engines that discovery found, kept for the process started next.

A process that takes over reads the settings, which lack the orders and the found engines since then.
With --roster-state it outlives the proxy.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from msgspec import Raw, Struct
from msgspec.json import decode, encode
from msgspec.structs import replace

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer, check_ranks
from balanceroute.topologies import MAX_RANKS

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0
_ALONE = ""


class OrderedState(Struct, frozen=True):
    """The engines, the policy and the log level, as they were ordered, and a limit that was found."""

    policy: str
    prefillers: tuple[PrefillServer, ...]
    decoders: tuple[DecodeServer, ...]
    draining: tuple[Target, ...] = ()  # The engines to which nothing new goes.
    # The engines that are here because they were found; see `Reconciler`.
    discovered: tuple[Target, ...] = ()
    # Of these, those that are drained because they are found no more.
    leaving: tuple[Target, ...] = ()
    basis: str = ""  # Names the settings that it was made of.
    log_level: str = ""  # Empty for that of the settings.
    inflight_limit: int | None = None  # What `--aimd` had come to, per rank; None to begin anew.
    paused: bool = False  # Whether no prefill may start; see `Pausing`.
    # Of those that are drained, some, with the Unix time at which they are left.
    deadlines: tuple[tuple[Target, float], ...] = ()
    # Of these, some that are to be forgotten when they have no request.
    removing: tuple[Target, ...] = ()


class OrderStore:
    """Keeps it, each group of engines as a part of its own; a proxy without groups is one, named "".

    Without a file nothing is encoded until a hand-over asks for it, which may never be.

    Args:
        path: The file; None to keep it in this process, which passes it to its successor.
        handed_over: What its predecessor passed to this process, which is newer than the file.
    """

    def __init__(self, path: Path | None = None, handed_over: bytes = b"") -> None:
        self._path, self._before = path, handed_over
        # What the file does not have: parts as they were read, and what returns their states.
        self._parts: dict[str, bytes | Callable[[], Struct]] = {}
        self._has_groups = self._unwritten = self._suspended = self._handed_over = False

    def load(self, group: str) -> bytes:
        """Return the last kept state of a group; empty for none. Raises OSError or ValueError."""
        if group != _ALONE:
            return _encoded(self._groups().get(group, b""))
        return _encoded(self._parts[_ALONE]) if _ALONE in self._parts else self._read()

    def content(self) -> bytes:
        """Return all of it. Raises OSError."""
        if not self._parts and not self._has_groups:
            return self._read()
        if _ALONE in self._parts:
            return _encoded(self._parts[_ALONE])
        return encode({group: Raw(_encoded(part)) for group, part in self._parts.items()})

    def changed(
        self,
        group: str,
        state: Callable[[], Struct],
        *,
        forgotten: str = "",
        what: str = "orders",
    ) -> None:
        """Keep the state of a group from now on. What cannot be written is logged, and holds here.

        Args:
            group: Its name.
            state: Returns the state, now or when it is asked for.
            forgotten: Another group, of which nothing is kept any more.
            what: What the log calls it.
        """
        try:
            parts = self._parts if group == _ALONE else self._groups()
            parts[group] = state
            if forgotten:
                parts.pop(forgotten, None)
            self._write()
        except (OSError, ValueError) as error:
            _log.error("%s are not kept", what, extra={"fields": {"reason": str(error)}})

    def retry(self) -> bool:
        """Write what could not be written; return whether there was something. Raises OSError."""
        if not self._unwritten or self._suspended or self._handed_over:
            return False
        self._write()
        return True

    def suspend(self) -> None:
        """Write nothing while another process begins with the present state."""
        self._suspended = True

    def resume(self) -> None:
        """Write again, also what has changed meanwhile: that process does not take over."""
        self._suspended = False
        with suppress(OSError):  # It is tried again.
            self.retry()

    def hand_over(self) -> None:
        """Write nothing any more: the file is another process's."""
        self._handed_over = True

    def _groups(self) -> dict[str, bytes | Callable[[], Struct]]:
        if not self._has_groups:
            data = self._read()
            kept = decode(data, type=dict[str, Raw]) if data else {}
            self._parts = {group: bytes(part) for group, part in kept.items()}
            self._has_groups = True
        return self._parts

    def _read(self) -> bytes:
        if self._before or self._path is None:
            return self._before
        return self._path.read_bytes() if self._path.exists() else b""

    def _write(self) -> None:
        if self._path is None or self._handed_over:
            return
        self._unwritten = True
        if self._suspended:
            return
        # Once, also if it is to be tried again and again.
        self._parts = {group: _encoded(part) for group, part in self._parts.items()}
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_bytes(self.content())
            new.replace(self._path)
        except OSError:
            with suppress(OSError):  # On a full disk, half of it takes room.
                new.unlink()
            raise
        # From now on the file says it.
        self._before, self._parts = b"", {}
        self._unwritten = self._has_groups = False


def _encoded(part: bytes | Callable[[], Struct]) -> bytes:
    return part if isinstance(part, bytes) else encode(part())


def ordered_state(store: OrderStore | None, group: str, settings: OrderedState) -> OrderedState:
    """Return the kept state of a group, else the settings; with other settings, those and the found engines."""
    try:
        data = b"" if store is None else store.load(group)
        kept = decode(data, type=OrderedState) if data else settings
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


async def keep_trying(store: OrderStore) -> None:
    """Write what could not be written, as on a full disk, as soon as that can be; for ever."""
    while True:
        await asyncio.sleep(_AGAIN_S)
        with suppress(OSError):  # The answer to the order has reported it.
            if store.retry():
                _log.info("orders are kept again")
