"""The scheduler process: its proxy, and the socket at which relays connect."""

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING

from balanceroute.proxy.live.processes.channel import Channel
from balanceroute.proxy.live.processes.frames import for_scheduler

if TYPE_CHECKING:
    from balanceroute.proxy.live.processes.from_relay import FromRelay
    from balanceroute.proxy.live.scheduler_app import SchedulerApp

_log = logging.getLogger(__name__)


class SchedulerProcess:
    """Runs an app. `start` it, then `drain` and `close` it.

    Args:
        app: What decides.
        listener: The descriptor of a Unix socket that listens.
    """

    def __init__(self, app: "SchedulerApp", listener: int) -> None:
        self.servers = app.servers
        self.renew = app.renew
        self.watch = app.watch
        self._app = app
        self._listener = listener
        # By its desk.
        self._channels: dict[object, Channel[FromRelay]] = {}
        self._alone = asyncio.Event()
        self._alone.set()
        self._server: asyncio.Server

    async def start(self) -> None:
        """Find the engines, and take relays."""
        await self._app.start()
        self._server = await asyncio.get_running_loop().create_unix_server(
            self._accept, sock=socket.socket(fileno=self._listener)
        )

    def processes(self) -> dict[str, int]:
        """Return the numbers of all processes, by name."""
        found = {"supervisor": os.getppid(), "scheduler": os.getpid()}
        for place, desk in sorted(self._app.hub.desks.items()):
            channel = self._channels.get(desk)
            pid = None if channel is None else channel.peer_pid
            if pid is not None:
                found[f"relay-{place}"] = pid
        return found

    def hand_over(self) -> None:
        """Leave administrators to another process, and serve relays until they are gone."""
        self._app.hand_over()

    async def drain(self) -> None:
        """Drain, and serve relays until they are gone: their clients may still be reading."""
        await self._app.drain()
        await self._alone.wait()

    async def close(self) -> None:
        """End what is left and close every socket."""
        self._server.close()
        for channel in list(self._channels.values()):
            channel.close("the scheduler process ends")
        await self._app.close()

    def _accept(self) -> "Channel[FromRelay]":
        def take(messages: "list[FromRelay]") -> None:
            desk.take(messages)

        def closed(reason: str) -> None:
            _log.info("a relay is gone", extra={"fields": {"reason": reason}})
            desk.gone()
            del self._channels[desk]
            if not self._channels:
                self._alone.set()

        channel = Channel(for_scheduler(), on_messages=take, on_close=closed)
        desk = self._app.connect(channel.write)
        self._channels[desk] = channel
        self._alone.clear()
        return channel
