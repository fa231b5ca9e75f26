"""File descriptors: how many the process may have, what they are enough for, and whether one is left.

Under uvloop a failed accept is invisible: libuv closes the newcomer and says nothing. So connections
are bounded below what the descriptors allow, and a watch looks whether there is still one to have.
"""

import asyncio
import logging
import os
import resource
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)

# What vLLM asks for is 65,535; more only lets more clients wait.
_ENOUGH = 65_536
# Log files, listeners, the event loop's own, probes and scrapes, and newcomers that are rejected.
_OWN = 64
_PER_ENGINE = 4
# A client's, its decode rank's, and its prefiller's, which is kept for the next request.
_PER_CLIENT = 3
_WATCH_S = 1.0
_LOG_INTERVAL_S = 60.0


def raise_limit() -> int:
    """Raise the soft limit of open files as far as it is useful; return the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= ceiling:
        return _ENOUGH if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    return ceiling


def connections_for(descriptors: int, engines: int) -> int:
    """Return how many clients may be connected, so that enough is left for their engines.

    Args:
        descriptors: The limit of open files.
        engines: Prefillers and decode ranks.
    """
    reserve = min(descriptors // 2, _OWN + _PER_ENGINE * engines)
    return max(1, (descriptors - reserve) // _PER_CLIENT)


def _take() -> int:
    return os.open(os.devnull, os.O_RDONLY)


class DescriptorWatch:
    """Looks every second whether a descriptor can be had, and whether the listeners are open.

    Args:
        listeners: The descriptors of the listening sockets, as long as they are meant to be open.
        probe: Takes a descriptor, or raises OSError.

    Attributes:
        shortages: How often there was none.
    """

    def __init__(
        self, listeners: Callable[[], Iterable[int]], *, probe: Callable[[], int] = _take
    ) -> None:
        self.shortages = 0
        self._listeners = listeners
        self._probe = probe

    async def run(self) -> None:
        """Look until cancelled.

        Raises:
            RuntimeError: A listener was closed from outside: the process cannot serve any more.
        """
        opened = {number: os.fstat(number).st_ino for number in self._listeners()}
        clock = asyncio.get_running_loop().time
        log_at_s, unlogged = 0.0, 0
        while True:
            await asyncio.sleep(_WATCH_S)
            for number in self._listeners():
                if _inode(number) != opened.get(number):
                    raise RuntimeError(f"the listening socket {number} was closed")
            try:
                os.close(self._probe())
            except OSError as error:
                self.shortages += 1
                unlogged += 1
                if clock() >= log_at_s:
                    log_at_s = clock() + _LOG_INTERVAL_S
                    fields = {"reason": error.strerror, "count": unlogged}
                    unlogged = 0
                    _log.error("no file descriptor is left", extra={"fields": fields})


def _inode(number: int) -> int | None:
    try:
        return os.fstat(number).st_ino
    except OSError:
        return None
