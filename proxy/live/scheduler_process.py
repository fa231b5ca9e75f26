"""The scheduler process: its proxy, and the socket at which relays connect."""

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.live.control.standing import make_private
from balanceroute.proxy.live.processes.channel import Channel
from balanceroute.proxy.live.processes.frames import for_scheduler

if TYPE_CHECKING:
    from balanceroute.proxy.live.processes.from_relay import FromRelay
    from balanceroute.proxy.live.scheduler_app import SchedulerApp

_log = logging.getLogger(__name__)
# How often it is looked whether relays still find the socket.
_LOOK_S = 1.0
_LOG_INTERVAL_S = 60.0


class SchedulerProcess:
    """Runs an app. `start` it, then `drain` and `close` it.

    Args:
        app: What decides.
        path: Where relays connect, in a private folder; made again if somebody removes it.
    """

    def __init__(self, app: "SchedulerApp", path: Path) -> None:
        self.servers = app.servers
        self.renew = app.renew
        self.watch = app.watch
        self._app = app
        self._path = path
        # By its desk.
        self._channels: dict[object, Channel[FromRelay]] = {}
        self._alone = asyncio.Event()
        self._alone.set()
        self._server: asyncio.Server
        self._staying: asyncio.Task[None]

    async def start(self) -> None:
        """Find the engines, and take relays. Raises OSError: relays cannot connect at the path."""
        await self._app.start()
        self._server = await self._listen()
        self._staying = asyncio.create_task(self._stay(_identity(self._path)))

    async def _listen(self) -> asyncio.Server:
        make_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            one.bind(str(self._path))
            one.setblocking(False)
            return await asyncio.get_running_loop().create_unix_server(self._accept, sock=one)
        except OSError:
            one.close()
            raise

    async def _stay(self, own: "tuple[int, int] | None") -> None:
        """Listen again whenever somebody has removed the socket."""
        clock, log_at_s = asyncio.get_running_loop().time, 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            if _identity(self._path) == own:
                continue
            try:
                server = await self._listen()
            except OSError as error:
                if clock() >= log_at_s:
                    log_at_s = clock() + _LOG_INTERVAL_S
                    fields = {"path": str(self._path), "reason": str(error)}
                    _log.error("relays cannot connect any more", extra={"fields": fields})
                continue
            self._server.close()
            self._server, own = server, _identity(self._path)
            fields = {"path": str(self._path)}
            _log.warning(
                "the socket of relays was removed: it is made again", extra={"fields": fields}
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
        self._staying.cancel()
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


def _identity(path: Path) -> "tuple[int, int] | None":
    """Return what tells a file from others that have been at its place; None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
