"""A scheduler process and its relays, of one version of the program and of its settings."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.live.processes.kept_process import KeptProcess
from balanceroute.proxy.live.processes.part import Part, gone_word

if TYPE_CHECKING:
    import socket

# After the time that requests have to end.
_END_S = 10.0


class Generation:
    """Processes that belong together. `run` them; `hand_over` or `end` them.

    Args:
        command: Returns the command line of a part, whenever that is started. Raises OSError.
        path: Where their socket is to be, in a private folder.
        relays: The listening sockets of each relay.
        admin: Those of the scheduler process.
        drain_s: How long requests may take to end.
        hang_s: A process that stands still for so long is replaced.

    Attributes:
        path: Where their socket is.
    """

    def __init__(
        self,
        command: Callable[[Part], Sequence[str]],
        path: Path,
        relays: "Sequence[Sequence[socket.socket]]",
        admin: "Sequence[socket.socket]",
        *,
        drain_s: float,
        hang_s: float,
    ) -> None:
        self.path = path
        self._drain_s = drain_s
        self._serving = asyncio.Event()
        self._handed_over = self._ending = False
        self._bound: asyncio.TimerHandle | None = None
        count = len(relays)
        parts = [Part("scheduler", str(path), _numbers(admin), count)]
        numbers = {index: _numbers(sockets) for index, sockets in enumerate(relays)}
        for index, own_numbers in numbers.items():
            others = {other: them for other, them in numbers.items() if other != index}
            parts.append(Part("relay", str(path), own_numbers, count, relay=index, others=others))
        self._processes = [
            KeptProcess(
                part.name, partial(command, part), part.inherited, self._changed, hang_s=hang_s
            )
            for part in parts
        ]

    async def run(self) -> None:
        """Keep the processes running until they have ended after `end` or `hand_over`.

        Raises:
            StartError: One of them does not start.
            OSError: One of them cannot be run at all.
        """
        tasks = [asyncio.create_task(one.run()) for one in self._processes]
        scheduler, *relays = tasks
        tasks.append(asyncio.create_task(self._end_scheduler_after(relays)))
        try:
            await asyncio.gather(scheduler, tasks[-1])
        finally:
            if self._bound is not None:
                self._bound.cancel()
            for one in self._processes:
                one.kill()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def serving(self) -> None:
        """Wait until every process has been ready."""
        await self._serving.wait()

    def end(self) -> None:
        """Let requests end, but take no new ones. A second time, end at once."""
        self._ending = True
        for one in self._processes:
            one.end()
        self._bound_end()

    def hand_over(self) -> None:
        """Leave new connections to another generation, and let those that are open end."""
        self._handed_over = True
        scheduler, *relays = self._processes
        scheduler.send(signal.SIGUSR2)
        for one in relays:
            one.hand_over()
        self._bound_end()

    def send(self, number: signal.Signals) -> None:
        """Send every process a signal."""
        for one in self._processes:
            one.send(number)

    def _kill(self) -> None:
        for one in self._processes:
            one.kill()

    async def _end_scheduler_after(self, relays: "Sequence[asyncio.Task[None]]") -> None:
        """After a hand-over: it serves the relays to their end."""
        await asyncio.gather(*relays)
        if not self._ending:
            self._processes[0].end()

    def _bound_end(self) -> None:
        if self._bound is None:
            loop = asyncio.get_running_loop()
            self._bound = loop.call_later(self._drain_s + _END_S, self._kill)

    def _changed(self) -> None:
        scheduler, *relays = self._processes
        if self._handed_over:
            if scheduler.ready:  # It may have been started again.
                scheduler.send(signal.SIGUSR2)
            return
        if all(one.ready for one in self._processes):
            self._serving.set()
        if self._serving.is_set() and not self._ending:
            gone = gone_word(place for place, one in enumerate(relays) if not one.ready)
            for one in relays:
                one.tell(gone)


def _numbers(sockets: "Sequence[socket.socket]") -> tuple[int, ...]:
    return tuple(one.fileno() for one in sockets)
