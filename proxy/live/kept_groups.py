"""Which groups were added to those of the settings, and which were removed, kept over a restart."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.json import decode, encode

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.standing import Keeper, KeepingPart, basis_of

if TYPE_CHECKING:
    from balanceroute.proxy.live.settings.config import GroupConfig

# Beside the parts of the groups: no group can have this name.
_PLACE = "[[model]]"
_log = logging.getLogger(__name__)


class _Kept(Struct, frozen=True):
    """What was ordered.

    Attributes:
        basis: Names the groups of the settings that it was ordered for.
        added: What the `[[model]]` tables of the groups that were added would have.
        removed: The groups of the settings that were removed.
    """

    basis: str
    added: tuple[dict[str, Any], ...] = ()
    removed: tuple[str, ...] = ()


class KeptGroups:
    """Loads and keeps it.

    Args:
        keeper: Outlives the process; None to keep nothing.
        groups: Those of the settings.
        make: Returns a group's settings, given what its table would have. Raises ConfigError.
    """

    def __init__(
        self,
        keeper: Keeper | None,
        groups: "tuple[GroupConfig, ...]",
        make: "Callable[[Mapping[str, object]], GroupConfig]",
    ) -> None:
        self._whole = keeper
        self._keeper = None if keeper is None else KeepingPart(keeper, _PLACE)
        self._groups = groups
        self._make = make
        self._basis = basis_of(*((one.name, one.models) for one in groups))
        self._added: dict[str, dict[str, Any]] = {}
        self._removed: set[str] = set()

    def load(self) -> "tuple[GroupConfig, ...]":
        """Return the groups as they stood last, else those of the settings."""
        kept = self._read()
        if kept.basis != self._basis:
            _log.warning("orders about groups are dropped: the settings have other groups by now")
            return self._groups
        groups = [one for one in self._groups if one.name not in kept.removed]
        for table in kept.added:
            try:
                groups.append(self._make(table))
            except ConfigError as error:
                fields = {"group": table.get("name"), "reason": str(error)}
                _log.error("a group that was added is lost", extra={"fields": fields})
            else:
                self._added[groups[-1].name] = table
        if not groups:
            _log.error("orders about groups are lost: no group is left")
            return self._groups
        self._removed.update(kept.removed)
        return tuple(groups)

    def add(self, name: str, table: Mapping[str, object]) -> None:
        """Keep that a group was added."""
        self._added[name] = dict(table)
        self._keep()

    def remove(self, name: str) -> None:
        """Keep that a group was removed, and nothing that was ordered about its engines."""
        if self._added.pop(name, None) is None:
            self._removed.add(name)
        self._keep(forgotten=name)

    def _read(self) -> _Kept:
        nothing = _Kept(self._basis)
        try:
            data = b"" if self._keeper is None else self._keeper.read()
            return decode(data, type=_Kept) if data else nothing
        except (OSError, ValueError) as error:
            _log.error("orders about groups are lost", extra={"fields": {"reason": str(error)}})
            return nothing

    def _keep(self, forgotten: str = "") -> None:
        """Keep how it stands now, and nothing of the engines of one that is gone."""
        if self._whole is None or self._keeper is None:
            return
        kept = _Kept(self._basis, tuple(self._added.values()), tuple(sorted(self._removed)))
        try:
            self._keeper.write(encode(kept))
            if forgotten:
                KeepingPart(self._whole, forgotten).forget()
        except (OSError, ValueError) as error:
            fields = {"reason": str(error)}
            _log.error("orders about groups are not kept", extra={"fields": fields})
