"""The process that starts the others, and starts them again: `serve --workers N`.

It takes no part in serving, has no thread of its own and no state but what it started. Signals:

    SIGTERM, SIGINT   The processes drain, and everything ends. A second one ends it at once.
    SIGHUP            Passed on: every process reads logs, keys and certificates again.
    SIGUSR2           A new version takes over: new processes are started of the program and the
                      settings as they are now on the disk, and told what was ordered of the old ones.
                      When they serve, the old ones accept no more connections, and end with those
                      that are open. The listening sockets stay open throughout.

If the supervisor itself dies, its processes end at once, because their standard input does.
"""

import asyncio
import logging
import signal
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.control.standing import make_private
from balanceroute.proxy.live.processes.generation import Generation
from balanceroute.proxy.live.processes.part import HANG_S, Part, orders_beside

if TYPE_CHECKING:
    import socket

Commands = Callable[[Path], Callable[[Part], Sequence[str]]]

_log = logging.getLogger(__name__)


class Supervisor:
    """Runs generations of processes, of which the newest serves.

    Args:
        commands: Called with where the socket of a new generation is to be; returns what returns the
            command line of each of its parts whenever that is started.
        relays: The listening sockets of each relay.
        admin: Those of the scheduler process.
        drain_s: How long requests may take to end.
        hang_s: A process that stands still for so long is replaced.
        hang_up: Called on SIGHUP.
    """

    def __init__(
        self,
        commands: "Commands",
        relays: "Sequence[Sequence[socket.socket]]",
        admin: "Sequence[socket.socket]",
        *,
        drain_s: float,
        hang_s: float = HANG_S,
        hang_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._commands = commands
        self._relays = relays
        self._admin = admin
        self._times = {"drain_s": drain_s, "hang_s": hang_s}
        self._hang_up = hang_up
        self._numbers = count()
        self._running: dict[Generation, asyncio.Task[None]] = {}
        self._newest: Generation
        self._stopping = False
        self._renewing: asyncio.Task[None] | None = None

    async def run(self, announce: Callable[[], None]) -> None:
        """Serve until a signal ends it.

        Args:
            announce: Called once, when the first generation serves.

        Raises:
            StartError: A process does not start.
            OSError: One cannot be run at all.
        """
        with tempfile.TemporaryDirectory(prefix="balanceroute-") as folder:
            try:
                self._newest = self._launch(Path(folder))
                self._handle_signals(Path(folder))
                if await self._serves(self._newest):
                    announce()
                ended = None
                while ended is not self._newest:  # Else a new version has taken over meanwhile.
                    ended = self._newest
                    await self._running[ended]
                    del self._running[ended]
                # A new version may still start, or an old one drain.
                await asyncio.gather(*self._running.values())
            finally:
                await self._kill()

    def _handle_signals(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on)
        loop.add_signal_handler(signal.SIGUSR2, self._begin_renewal, folder)

    def _stop(self) -> None:
        self._stopping = True
        # Who connects now is refused, and does not wait for a process that will not come.
        for one in chain(*self._relays, self._admin):
            one.close()
        for generation in self._running:
            generation.end()

    def _pass_on(self) -> None:
        self._hang_up()
        for generation in self._running:
            generation.send(signal.SIGHUP)

    def _begin_renewal(self, folder: Path) -> None:
        if self._stopping:
            return
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(folder))
        else:
            _log.warning("a new version is starting already")

    async def _renew(self, folder: Path) -> None:
        """Start a new generation; when it serves, hand over to it."""
        old = self._newest
        try:
            new = self._launch(folder, old)
            if not await self._serves(new):
                return
        except (BalanceRouteError, OSError) as error:
            fields = {"reason": str(error)}
            _log.error(
                "the new version does not start: the old one stays", extra={"fields": fields}
            )
            return
        self._newest = new
        _log.info("a new version serves: the old one lets its connections end")
        old.hand_over()

    def _launch(self, folder: Path, old: Generation | None = None) -> Generation:
        """Start a generation, for which holds what was ordered of an old one."""
        make_private(folder)
        path = folder / str(next(self._numbers))
        if old is not None and orders_beside(old.path).exists():
            copyfile(orders_beside(old.path), orders_beside(path))
        command = self._commands(path)
        new = Generation(command, path, self._relays, self._admin, **self._times)
        self._running[new] = asyncio.create_task(new.run())
        return new

    async def _serves(self, new: Generation) -> bool:
        """Wait until a generation serves, or has ended before that; return whether it serves."""
        serving = asyncio.create_task(new.serving())
        running = self._running[new]
        try:
            await asyncio.wait((serving, running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if running.done():
            if new is not self._newest:
                del self._running[new]
            running.result()
            return False
        return True

    async def _kill(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        for task in self._running.values():
            task.cancel()  # Which kills its processes.
        await asyncio.gather(*self._running.values(), return_exceptions=True)
