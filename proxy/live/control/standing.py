"""What administrators and discovery have made of the settings, kept for the process started next.

A process that takes over reads the settings; what was ordered and found since then is in none of them.
With --roster-state it outlives the proxy.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Raw, Struct
from msgspec.json import decode, encode
from msgspec.structs import replace

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.orders import ConflictError, UnknownInstanceError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer, check_ranks
from balanceroute.topologies import MAX_RANKS

if TYPE_CHECKING:
    from balanceroute.proxy.live.control.roster import Roster


_log = logging.getLogger(__name__)
_AGAIN_S = 1.0


class StandingOrders(Struct, frozen=True):
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


def load(keeper: Keeper | None, settings: StandingOrders) -> StandingOrders:
    """Return what was kept, else the settings; of other settings the engines that were found."""
    try:
        data = b"" if keeper is None else keeper.read()
        kept = decode(data, type=StandingOrders) if data else settings
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


def save(keeper: Keeper, standing: StandingOrders) -> None:
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


# Orders about engines, where there may be several groups of them.


class EngineOrders:
    """Passes each order on to the group that it is about; see `Roster`.

    Args:
        rosters: Returns those of the groups by name, and that of a proxy without groups by "".
    """

    def __init__(self, rosters: "Callable[[], Mapping[str, Roster]]") -> None:
        self._rosters = rosters

    async def add(
        self,
        role: Role,
        url: str,
        *,
        ranks: int | None,
        bootstrap: str | None,
        group: str | None = None,
        kv_events: str | None = None,
        kv_replay: str | None = None,
    ) -> None:
        """Add an instance to a group; None without groups, or to take a draining one back.

        Raises:
            ConfigError: The order cannot be carried out, names no group where there are some, or names KV
                cache events that nobody would follow.
            ConflictError: It is there already, perhaps in another group.
            UnknownInstanceError: There is no such group.
        """
        rosters, base = self._rosters(), EngineUrl.parse(url).base
        both = [Target(either, base) for either in Role]
        owners = [name for name, one in rosters.items() if any(map(one.instances.has, both))]
        name = owners[0] if group is None and owners else group
        name = named(rosters, name)
        if any(one != name for one in owners):
            raise ConflictError(f"{base} is an engine of the group {owners[0]!r}")
        roster = rosters[name]
        if kv_events is not None and role is not Role.PREFILL:
            raise ConfigError("kv_events: only prefillers tell what they have cached")
        if kv_events is not None and roster.instances.engine_blocks is None:
            raise ConfigError(
                "kv_events: none are followed: start the proxy with --kv-events or --kv-events-port"
            )
        await roster.add(
            role, url, ranks=ranks, bootstrap=bootstrap, kv_events=kv_events, kv_replay=kv_replay
        )

    def drain(self, role: Role, url: str, *, deadline_s: float | None = None) -> None:
        """Send nothing new to an instance; see `Roster.drain`."""
        self._having(role, url).drain(role, url, deadline_s=deadline_s)

    def move_away(self, role: Role, url: str) -> None:
        """Have requests on an instance go on elsewhere in its group; see `Roster.move_away`."""
        self._having(role, url).move_away(role, url)

    def remove(self, role: Role, url: str, *, force: bool) -> None:
        """Forget an instance; see `Roster.remove`."""
        self._having(role, url).remove(role, url, force=force)

    def _having(self, role: Role, url: str) -> "Roster":
        """Return the roster that has an instance, or one that says that it has not."""
        rosters = list(self._rosters().values())
        target = Target(role, EngineUrl.parse(url).base)
        return next((one for one in rosters if one.instances.has(target)), rosters[0])


def named(groups: Mapping[str, object], group: str | None) -> str:
    """Return the name of a group that an order is about; None stands for the only one.

    Raises:
        ConfigError: There are groups, and none is named.
        UnknownInstanceError: There is no such group.
    """
    if group is None and "" not in groups:
        raise ConfigError(f"group is missing, one of {', '.join(groups)}")
    name = group or ""
    if name not in groups:
        raise UnknownInstanceError(f"there is no group {name!r}")
    return name
