"""A protocol that writes down its callbacks and lets a coroutine wait for them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.support.played import played_by
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

HOST, PORT = "10.0.0.1", 8000


class Recorder(asyncio.Protocol):
    """Records what a transport calls, on a virtual or a real loop."""

    # The transport, from connection_made on; it is kept after connection_lost.
    transport: asyncio.Transport

    def __init__(
        self,
        *,
        keep_open: bool = False,
        on_data: Callable[["Recorder", bytes], None] | None = None,
    ) -> None:
        """Make a recorder.

        Args:
            keep_open: What eof_received returns.
            on_data: Called after each data_received is recorded.
        """
        # Names of the callbacks, with their arguments where they say more: "data" once for
        # data_received calls that follow each other, "lost None" or "lost ConnectionResetError".
        self.calls: list[str] = []
        self.received = bytearray()  # The bytes of all data_received calls.
        self.sizes: list[int] = []  # Of each data_received call.
        self._keep_open = keep_open
        self._on_data = on_data
        self._changed = asyncio.Event()

    async def until(self, reached: Callable[["Recorder"], bool]) -> None:
        """Wait until something holds of this recorder; it is looked at after each callback."""
        while not reached(self):
            self._changed.clear()
            await self._changed.wait()

    async def until_called(self, call: str) -> None:
        """Wait for a callback, recorded as `call`."""
        await self.until(lambda recorder: call in recorder.calls)

    async def until_lost(self) -> None:
        await self.until(lambda recorder: recorder.is_lost)

    @property
    def is_lost(self) -> bool:
        return bool(self.calls) and self.calls[-1].startswith("lost")

    def _record(self, call: str) -> None:
        self.calls.append(call)
        self._changed.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Both loops' stream transports are asyncio.Transport, or look like it (uvloop's).
        self.transport = transport  # type: ignore[assignment]
        self._record("made")

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.sizes.append(len(data))
        if self.calls[-1] == "data":
            self._changed.set()
        else:
            self._record("data")
        if self._on_data is not None:
            self._on_data(self, data)

    def eof_received(self) -> bool:
        self._record("eof")
        return self._keep_open

    def pause_writing(self) -> None:
        self._record("pause")

    def resume_writing(self) -> None:
        self._record("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self._record(f"lost {None if exc is None else type(exc).__name__}")


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends of a connection."""

    loop: VirtualLoop
    client: Recorder
    server: Recorder


def on_a_pair(
    body: Callable[[Pair], Awaitable[None]],
    *,
    link: Link | None = None,
    seed: int = 1,
    **options: Any,
) -> None:
    """Run a body with a client and a server, and close what it leaves open; both must end up lost."""

    async def main(loop: VirtualLoop) -> None:
        server = Recorder(keep_open=True)
        listener = await loop.create_server(lambda: server, HOST, PORT)
        _, client = await loop.create_connection(Recorder, HOST, PORT)
        await server.until_called("made")
        await body(Pair(loop, client, server))
        client.transport.close()
        server.transport.close()
        listener.close()
        await listener.wait_closed()
        assert loop.network.traffic.open_connections == 0
        assert loop.network.connections() == []

    run(main, seed=seed, link=link, **options)


with_a_pair = played_by(on_a_pair)


async def listen(loop: VirtualLoop, made: list[Recorder]) -> Callable[[], None]:
    """Accept recorders into a list; return what stops that."""

    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    return (await loop.create_server(make, HOST, PORT)).close
