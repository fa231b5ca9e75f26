"""A relay's connection to scheduler processes that come and go."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from balanceroute.proxy.live import relay_process
from balanceroute.proxy.live.processes.frames import VERSION, encode
from balanceroute.proxy.live.processes.from_relay import FromRelay, Hello
from balanceroute.proxy.live.processes.to_relay import ToRelay, Unwelcome, Welcome
from balanceroute.proxy.live.relay_process import LinkError, RelayProcess

if TYPE_CHECKING:
    from balanceroute.proxy.live.relay_app import RelayApp

WELCOME = Welcome(VERSION, "s", 1, False)


class App:
    """Says hello and notes what happens."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.servers = self.renew = None
        self.public = self

    def connect(
        self, write: Callable[[Sequence[FromRelay]], None], behind: Callable[[], bool]
    ) -> None:
        assert not behind()
        write([Hello(VERSION, 0, "")])

    def gone(self) -> None:
        self.seen.append("gone")

    def take(self, messages: Sequence[ToRelay]) -> None:
        self.seen += [type(one).__name__ for one in messages]

    async def start(self, sockets: Sequence[object]) -> None:
        self.seen.append("listens")

    async def accept_too(self, one: socket.socket) -> "Listener":
        self.seen.append("accepts")
        return Listener(self.seen, one)

    async def drain(self) -> None:
        self.seen.append("drains")

    async def close(self) -> None:
        self.seen.append("closed")


class Listener:
    """Notes that it is closed."""

    def __init__(self, seen: list[str], one: socket.socket) -> None:
        self._seen, self._socket = seen, one

    def close(self) -> None:
        self._socket.close()
        self._seen.append("accepts no more")


def play(path: Path, answers: list[ToRelay | None], seen: list[str], error: str = "") -> None:
    """Have a scheduler process answer each connection so and end, but for the last; None for no answer."""

    async def main() -> None:
        tasks: list[asyncio.Task[None] | None] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(asyncio.current_task())
            await reader.readexactly(4)
            answer = answers.pop(0)
            if answer is not None:
                writer.write(encode([answer]))
            if not (answers or isinstance(answer, Unwelcome)):
                await reader.read()
            writer.close()
            await writer.wait_closed()

        app = App()
        relay = RelayProcess(cast("RelayApp", app), str(path), (), {})
        async with asyncio.timeout(30.0), await asyncio.start_unix_server(serve, path):
            await relay.start()
            if error:
                with pytest.raises(LinkError, match=error):
                    await relay.watch()
            else:
                while app.seen != seen:  # noqa: ASYNC110 - none tells.
                    await asyncio.sleep(0.001)
            await relay.close()
            await asyncio.gather(*filter(None, tasks))
        assert app.seen == [*seen, "closed"]

    asyncio.run(main())


def test_it_outlives_scheduler_processes_that_die_before_they_answer(tmp_path: Path) -> None:
    seen = ["Welcome", "listens", "gone", "gone", "gone", "Welcome"]
    play(tmp_path / "s", [WELCOME, None, None, WELCOME], seen)


def test_it_ends_when_a_scheduler_process_refuses_it(tmp_path: Path) -> None:
    answers: list[ToRelay | None] = [WELCOME, Unwelcome("other settings")]
    play(tmp_path / "s", answers, ["Welcome", "listens", "gone"], error="other settings")


def test_it_tells_once_in_a_while_that_there_is_no_scheduler_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    monkeypatch.setattr(relay_process, "_CONNECT_S", 0.001)
    monkeypatch.setattr(relay_process, "_MISSED_S", 0.0)

    async def main(interval_s: float, count: int) -> None:
        monkeypatch.setattr(relay_process, "_LOG_INTERVAL_S", interval_s)
        relay = RelayProcess(cast("RelayApp", App()), str(path), (), {})
        starting = asyncio.create_task(relay.start())
        async with asyncio.timeout(30.0):
            while len(caplog.records) < count:  # noqa: ASYNC110 - none tells.
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        starting.cancel()
        await relay.close()

    asyncio.run(main(60.0, 1))
    assert caplog.messages == [f"no scheduler at {path}"]
    assert vars(caplog.records[0])["fields"] == {"reason": "No such file or directory"}
    caplog.clear()
    asyncio.run(main(0.0, 3))
    assert set(caplog.messages) == {f"no scheduler at {path}"}


def test_it_stands_in_for_relays_as_long_as_they_are_gone(tmp_path: Path) -> None:
    path, app = tmp_path / "s", App()
    tasks: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        writer.write(encode([WELCOME]))
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async def until(seen: list[str]) -> None:
        while app.seen != ["Welcome", "listens", *seen]:  # noqa: ASYNC110 - none tells.
            await asyncio.sleep(0.001)

    async def main(first: socket.socket, second: socket.socket) -> None:
        others = {0: (first.fileno(), second.fileno()), 2: (second.fileno(),), 3: (-1,)}
        relay = RelayProcess(cast("RelayApp", app), str(path), (), others)
        async with asyncio.timeout(30.0), await asyncio.start_unix_server(serve, path):
            await relay.start()
            relay.stand_in([0])
            seen = ["accepts", "accepts"]
            await until(seen)
            relay.stand_in([0, 2])
            relay.stand_in([2])
            seen += ["accepts", "accepts no more", "accepts no more"]
            await until(seen)
            # One that cannot be had is no reason to leave the others.
            relay.stand_in([2, 3])
            relay.stand_in([])
            seen += ["accepts no more"]
            await until(seen)
            await relay.close()
            await asyncio.gather(*filter(None, tasks))

    with socket.socket() as first, socket.socket() as second:
        asyncio.run(main(first, second))
        assert min(first.fileno(), second.fileno()) > 0
        first.getsockname()  # What is closed is a duplicate.


def test_it_keeps_no_socket_of_others_open_while_it_drains(tmp_path: Path) -> None:
    app = App()
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = one.getsockname()
        relay = RelayProcess(
            cast("RelayApp", app), str(tmp_path / "s"), (), {1: (one.dup().detach(),)}
        )
    socket.create_connection(address).close()
    asyncio.run(relay.drain())
    assert app.seen == ["drains"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
