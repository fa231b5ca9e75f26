"""File descriptors: how many the process may have, what they are enough for, and whether one is left.

Under uvloop a failed accept is invisible: libuv closes the newcomer and says nothing, or turns without a
pause. So connections are bounded below what the descriptors allow, and a watch looks whether there are
still some to have: else nothing is accepted until there are.
"""

import asyncio
import logging
import os
import resource
from collections.abc import Callable, Iterable

from balanceroute.proxy.wire.http1.server import Server

_log = logging.getLogger(__name__)

# What vLLM asks for is 65,535; more only lets more clients wait. Twice as many with the native pump.
_ENOUGH = 65_536
# Log files, listeners, the event loop's own, probes and scrapes, and newcomers that are rejected.
_OWN = 64
_PER_ENGINE = 4
# A client's, its decode rank's, and its prefiller's, which is kept for the next request.
_PER_CLIENT = 3
# Copies of two of them, by which the native pump moves a stream.
_PER_PUMPED = 2
# Left for the engines of the clients that are there: so many, or this part of the limit.
_FEW, _FEW_SHARE = 16, 32
_WATCH_S = 1.0
_LOG_INTERVAL_S = 60.0


def raise_limit(*, pumps: bool = False) -> int:
    """Raise the soft limit of open files as far as it is useful; return the limit now."""
    enough = 2 * _ENOUGH if pumps else _ENOUGH
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
    if soft == resource.RLIM_INFINITY or soft >= ceiling:
        return enough if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    return ceiling


def connections_for(descriptors: int, engines: int, *, pumps: bool = False) -> int:
    """Return how many clients may be connected, so that enough is left for their engines."""
    reserve = min(descriptors // 2, _OWN + _PER_ENGINE * engines)
    return max(1, (descriptors - reserve) // (_PER_CLIENT + _PER_PUMPED * pumps))


def _take() -> int:
    return os.open(os.devnull, os.O_RDONLY)


class DescriptorWatch:
    """Looks every second whether descriptors are left, and whether the listeners are open.

    Where there are none, or only a few, nothing more is accepted: those who are there have requests that
    need some.

    Args:
        probe: Takes a descriptor, or raises OSError.
        limit: Returns how many descriptors the process may have.
    """

    def __init__(
        self,
        servers: Callable[[], Iterable[Server]],
        *,
        probe: Callable[[], int] = _take,
        limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    ) -> None:
        self.shortages = 0  # How often there were too few.
        self._servers = servers
        self._probe = probe
        self._limit = limit
        self._opened: dict[int, int | None] = {}
        self._short_since_s: float | None = None
        self._log_at_s = 0.0
        self._unlogged = 0

    async def run(self) -> None:
        """Look until cancelled.

        Raises:
            RuntimeError: A listener was closed from outside: the process cannot serve any more.
        """
        clock = asyncio.get_running_loop().time
        try:
            for server in self._servers():
                server.keep_spares()
        except OSError as error:
            self._short(clock(), _why(error))
        self._note_listeners()
        while True:
            await asyncio.sleep(_WATCH_S)
            for number in self._listening():
                if _inode(number) != self._opened.get(number):
                    raise RuntimeError(f"the listening socket {number} was closed")
            reason = self._look()
            if reason is None and self._short_since_s is not None:
                reason = await self._resume(clock())
            if reason is not None:
                self._short(clock(), reason)

    def _listening(self) -> list[int]:
        return [number for server in self._servers() for number in server.listening]

    def _note_listeners(self) -> None:
        self._opened = {number: _inode(number) for number in self._listening()}

    def _look(self) -> str | None:
        """Return why there are too few descriptors; None if there are enough."""
        try:
            number = self._probe()
        except OSError as error:
            return _why(error)
        os.close(number)
        # The lowest that is free: all below it are in use.
        limit = self._limit()
        few = min(_FEW, limit // _FEW_SHARE)
        return f"{limit - number} of {limit} are left" if number >= limit - few else None

    def _short(self, now_s: float, reason: str) -> None:
        self.shortages += 1
        self._unlogged += 1
        if self._short_since_s is None:
            self._short_since_s = now_s
            for server in self._servers():
                server.pause()
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + _LOG_INTERVAL_S
            fields = {"reason": reason, "count": self._unlogged}
            self._unlogged = 0
            _log.error("no file descriptor is left: nothing is accepted", extra={"fields": fields})

    async def _resume(self, now_s: float) -> str | None:
        """Accept again; return why not, if so."""
        assert self._short_since_s is not None
        try:
            for server in self._servers():
                await server.resume()
                server.keep_spares()
        except OSError as error:
            for server in self._servers():
                server.pause()
            return _why(error)
        self._note_listeners()
        fields = {"seconds": round(now_s - self._short_since_s, 3)}
        self._short_since_s = None
        _log.info("file descriptors are left again", extra={"fields": fields})
        return None


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _inode(number: int) -> int | None:
    try:
        return os.fstat(number).st_ino
    except OSError:
        return None
