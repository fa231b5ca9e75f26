"""Engines in a file that somebody else writes: `[[prefill]]` and `[[decode]]` as in a topology."""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.discovery.found import Found
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.settings.checks import event_address
from balanceroute.topologies import TopologyError, read_engine_list
from balanceroute.topologies.topology import MAX_FILE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.live.discovery.found import View

_log = logging.getLogger(__name__)


class WatchedFile:
    """A file that is read again and again.

    Args:
        path: Of the file.
        interval_s: Between two readings.
        hears: Whether KV cache events of prefillers are followed at all.
    """

    def __init__(self, path: Path, *, interval_s: float, hears: bool = True) -> None:
        self._path, self._interval_s = path, interval_s
        self._reason = ""
        self._unheard = not hears  # Until it is logged.
        self._last: tuple[bytes, View] = b"", {}  # What was read, and what it told.

    async def run(self, tell: "Callable[[View], None]") -> None:
        """Tell the engines of the file after each reading."""
        while True:
            try:
                view = self._read()
            except (OSError, TopologyError, ConfigError) as error:
                self._log_once(str(error))
            else:
                self._log_once("")
                self._log_unheard(view)
                tell(view)
            await asyncio.sleep(self._interval_s)

    def _read(self) -> "View":
        """Return the engines; the same object while the file has the same bytes."""
        with self._path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        # To read thousands of engines takes a part of a second.
        if data != self._last[0]:
            self._last = data, read_view(self._path)
        return self._last[1]

    def _log_once(self, reason: str) -> None:
        if reason and reason != self._reason:
            fields = {"file": str(self._path), "reason": reason}
            _log.warning("the file of engines cannot be read", extra={"fields": fields})
        self._reason = reason

    def _log_unheard(self, view: "View") -> None:
        if self._unheard and any(found.kv_events for found in view.values()):
            self._unheard = False
            needed = "needs --prefill-choice prefix-aware and --kv-events-port"
            fields = {"file": str(self._path), "reason": needed}
            _log.warning(
                "kv_events of the file of engines is not followed", extra={"fields": fields}
            )


def read_view(path: Path) -> "View":
    """Return the engines of a file.

    Raises:
        OSError: It cannot be read.
        TopologyError: It is no list of engines.
        ConfigError: An address is none.
    """
    prefill, decode = read_engine_list(path)
    found = [
        Found(
            _target(path, Role.PREFILL, one.url),
            bootstrap=one.bootstrap,
            kv_events=_event_address(path, one.kv_events),
            kv_replay=_event_address(path, one.kv_replay),
        )
        for one in prefill
    ]
    for entry in prefill:
        if entry.kv_replay and not entry.kv_events:
            raise ConfigError(f"{path}: prefill url {entry.url}: kv_replay needs kv_events too")
    for one in decode:
        ids = one.rank_ids or (0,)
        if ids != tuple(range(len(ids))):
            raise ConfigError(f"{path}: decode url {one.url}: write ranks = N, not rank_ids")
        ranks = None if one.discover else len(ids)
        found.append(Found(_target(path, Role.DECODE, one.url), ranks))
    return {one.target: one for one in found}


def _event_address(path: Path, word: str | None) -> str | None:
    try:
        return None if word is None else event_address(word)
    except ConfigError as error:
        raise ConfigError(f"{path}: an address of KV cache events {error}") from None


def _target(path: Path, role: Role, word: str) -> Target:
    try:
        url = EngineUrl.parse(word)
    except ConfigError as error:
        raise ConfigError(f"{path}: {role.value} url {error}") from None
    if url.rank is not None:
        raise ConfigError(f"{path}: {role.value} url is {url.name!r}: write ranks = N")
    return Target(role, url.base)
