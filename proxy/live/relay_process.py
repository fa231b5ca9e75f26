"""A relay process: its listener, and its connection to the scheduler process."""

import asyncio
import logging
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.processes.channel import Channel
from balanceroute.proxy.live.processes.frames import for_relay
from balanceroute.proxy.live.processes.to_relay import ToRelay, Unwelcome, Welcome

if TYPE_CHECKING:
    from balanceroute.proxy.live.relay_app import RelayApp
    from balanceroute.proxy.wire.http1.listener import Listener

_log = logging.getLogger(__name__)
# Until the next attempt.
_CONNECT_S = 0.05
# For so long a scheduler process may be starting; then it is told, once in so many seconds.
_MISSED_S, _LOG_INTERVAL_S = 5.0, 60.0


class LinkError(BalanceRouteError):
    """The scheduler process does not take this relay."""


class RelayProcess:
    """Runs an app. `start` it, then `drain` and `close` it.

    Args:
        app: What serves clients.
        path: The Unix socket at which the scheduler process listens.
        listeners: Descriptors of sockets that listen for clients.
        others: Those of the other relays, by place.
    """

    def __init__(
        self,
        app: "RelayApp",
        path: str,
        listeners: Sequence[int],
        others: Mapping[int, Sequence[int]],
    ) -> None:
        self.servers = app.servers
        self.renew = app.renew
        self._app = app
        self._path = path
        self._listeners = listeners
        self._others = others
        self._told: asyncio.Queue[Collection[int]] = asyncio.Queue()
        self._stand_in: asyncio.Task[None] | None = None
        self._welcome, self._left = asyncio.Event(), asyncio.Event()
        self._unwelcome = False
        self._leaving: asyncio.Task[None] | None = None
        self._channel: Channel[ToRelay]
        self._link: asyncio.Task[None]

    def processes(self) -> dict[str, int]:
        """Return nothing: the scheduler process tells of all."""
        return {}

    async def start(self) -> None:
        """Connect, and then listen.

        Raises:
            LinkError: The scheduler process does not take this relay.
        """
        self._link = asyncio.create_task(self._stay_connected())
        await self._until(self._welcome)
        await self._app.start([socket.socket(fileno=number) for number in self._listeners])
        self._stand_in = asyncio.create_task(self._stand_in_for_others())

    async def watch(self) -> None:
        """Return when it was handed over and has no client left. Raise if it cannot serve any more."""
        await self._until(self._left)

    def stand_in(self, gone: Collection[int]) -> None:
        """Accept connections in place of these relays, and of no others."""
        self._told.put_nowait(gone)

    async def drain(self) -> None:
        """Take nothing new, and wait until everything that runs has ended or time is up."""
        if self._stand_in is not None:
            self._stand_in.cancel()
        # As long as anybody has a socket that listens, who connects is not refused, but waits.
        for number in chain(*self._others.values()):
            os.close(number)
        await self._app.drain()

    def hand_over(self) -> None:
        """Leave new connections to another process."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())

    async def close(self) -> None:
        """End what is left and close every socket."""
        for task in (self._link, self._leaving, self._stand_in):
            if task is not None:
                task.cancel()
        await self._app.close()
        self._channel.close("the relay ends")

    async def _leave(self) -> None:
        await self._app.hand_over()
        self._left.set()

    async def _stand_in_for_others(self) -> None:
        accepting: dict[int, list[Listener]] = {}
        while True:
            gone = await self._told.get()
            for place in accepting.keys() - gone:
                for listener in accepting.pop(place):
                    listener.close()
            for place in gone:
                if place in accepting:
                    continue
                accepting[place] = []
                try:
                    for number in self._others[place]:
                        one = socket.socket(fileno=os.dup(number))
                        accepting[place].append(await self._app.public.accept_too(one))
                except OSError as error:
                    fields = {"relay": place, "reason": str(error)}
                    _log.error("cannot stand in for another relay", extra={"fields": fields})

    async def _until(self, event: asyncio.Event) -> None:
        """Wait for something to happen. Raises LinkError if the scheduler process does not take it."""
        happened = asyncio.create_task(event.wait())
        try:
            await asyncio.wait((happened, self._link), return_when=asyncio.FIRST_COMPLETED)
        finally:
            happened.cancel()
        if self._link.done():
            self._link.result()

    async def _stay_connected(self) -> None:
        """Keep a connection to the scheduler process.

        Raises:
            LinkError: The scheduler process does not take this relay.
        """
        loop = asyncio.get_running_loop()
        log_at_s = loop.time() + _MISSED_S
        while True:
            closed: asyncio.Queue[str] = asyncio.Queue()
            channel = self._channel = Channel(
                for_relay(), on_messages=self._take, on_close=closed.put_nowait
            )
            try:
                await loop.create_unix_connection(lambda: self._channel, self._path)
            except OSError as error:
                if loop.time() >= log_at_s:
                    log_at_s = loop.time() + _LOG_INTERVAL_S
                    why = {"reason": error.strerror or str(error)}
                    _log.error("no scheduler at %s", self._path, extra={"fields": why})
                await asyncio.sleep(_CONNECT_S)
                continue
            self._app.connect(channel.write, lambda: self._channel.behind)
            reason = await closed.get()
            if self._unwelcome:
                raise LinkError(f"the scheduler process does not take this relay: {reason}")
            self._welcome.clear()
            self._app.gone()
            log_at_s = loop.time() + _MISSED_S
            await asyncio.sleep(_CONNECT_S)

    def _take(self, messages: list[ToRelay]) -> None:
        first = messages[0]  # Both answers to the greeting begin a frame.
        if isinstance(first, Unwelcome):
            self._unwelcome = True
            self._channel.close(first.reason)
            return
        if isinstance(first, Welcome):
            self._welcome.set()
        self._app.take(messages)
