"""Fixtures of the virtual network's tests: a connected pair, and a listener of recorders."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run
from tests.test_support.virtual.recorder import Recorder

HOST, PORT = "10.0.0.1", 8000
Body = Callable[[VirtualLoop, Recorder, Recorder], Coroutine[Any, Any, None]]


@pytest.fixture
def on_a_pair() -> Callable[..., None]:
    """Return a function that runs a body with a client and a server; both must end up lost."""

    def run_on_a_pair(
        body: Body, *, link: Link | None = None, seed: int = 1, **options: Any
    ) -> None:
        async def main(loop: VirtualLoop) -> None:
            server = Recorder(keep_open=True)
            listener = await loop.create_server(lambda: server, HOST, PORT)
            _, client = await loop.create_connection(Recorder, HOST, PORT)
            await server.until_called("made")
            await body(loop, client, server)
            listener.close()
            await listener.wait_closed()
            assert loop.network.traffic.open_connections == 0
            assert loop.network.connections() == []

        run(main, seed=seed, link=link, **options)

    return run_on_a_pair


@pytest.fixture
def listen() -> Callable[[VirtualLoop, list[Recorder]], Awaitable[Callable[[], None]]]:
    """Return a coroutine that accepts recorders into a list and gives what stops that."""

    async def start(loop: VirtualLoop, made: list[Recorder]) -> Callable[[], None]:
        def make() -> Recorder:
            made.append(Recorder())
            return made[-1]

        return (await loop.create_server(make, HOST, PORT)).close

    return start
