"""The same scenarios on asyncio over loopback sockets and on the virtual loop: equal callbacks.

Each scenario returns what both ends' protocols were called with. `Traffic.abort_resets` is off, since
a real abort() does not set SO_LINGER.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from tests.support.virtual.recorder import Recorder
from tests.support.virtual.runner import run

Seen = list[list[str] | bytes | str | int | bool]
Scenario = Callable[[asyncio.AbstractEventLoop], Awaitable[Seen]]
SCENARIOS: list[Scenario] = []
MUCH = bytes(range(256)) * 64 * 1024  # 16 MiB: over what loopback sockets hold.


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


@asynccontextmanager
async def pair(
    loop: asyncio.AbstractEventLoop, client: Recorder, server: Recorder
) -> AsyncIterator[None]:
    """Connect two recorders; in the end both must be lost."""
    listener = await loop.create_server(lambda: server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    await loop.create_connection(lambda: client, "127.0.0.1", port)
    await server.until_called("made")
    yield
    await client.until_lost()
    await server.until_lost()
    listener.close()


async def round_trip(loop: asyncio.AbstractEventLoop) -> None:
    """Let what is on its way arrive: a round trip takes longer than that."""
    client = Recorder()
    server = Recorder(on_data=lambda end, data: end.transport.write(data))
    async with pair(loop, client, server):
        client.transport.write(b"?")
        await client.until_called("data")
        client.transport.close()


def say_goodbye(end: Recorder, _: bytes) -> None:
    end.transport.write(b"goodbye")
    end.transport.close()


@scenario
async def echo(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder(on_data=lambda end, data: end.transport.write(data))
    async with pair(loop, client, server):
        client.transport.write(b"one")
        await client.until_called("data")
        client.transport.writelines([b" two", bytearray(b" three"), memoryview(b" four")])
        await client.until(lambda end: len(end.received) == len(b"one two three four"))
        client.transport.close()
    return [client.calls, server.calls, bytes(client.received)]


@scenario
async def server_closes_after_its_answer(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder(on_data=say_goodbye)
    async with pair(loop, client, server):
        client.transport.write(b"hello")
        await client.until_called("eof")
        seen = [client.transport.is_closing(), client.transport.is_reading()]
    return [client.calls, server.calls, bytes(client.received), *seen]


@scenario
async def half_close(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder(keep_open=True)
    async with pair(loop, client, server):
        client.transport.write(b"all I have")
        client.transport.write_eof()
        with pytest.raises(RuntimeError, match="write_eof"):
            client.transport.write(b"more")
        await server.until_called("eof")
        assert not server.transport.is_closing()
        server.transport.write(b"answer")
        server.transport.close()
    return [client.calls, server.calls, bytes(client.received), bytes(server.received)]


@scenario
async def eof_with_much_to_write_still_flushes(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        client.transport.pause_reading()
        server.transport.write(MUCH)
        client.transport.write_eof()
        await server.until_called("eof")
        assert server.transport.is_closing()
        client.transport.resume_reading()
    return [client.calls, server.calls, bytes(client.received) == MUCH]


@scenario
async def back_pressure(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.write(MUCH)
        full = client.transport.get_write_buffer_size() > 0
        await round_trip(loop)
        before = [*client.calls], len(server.received)
        server.transport.resume_reading()
        await server.until(lambda end: len(end.received) == len(MUCH))
        client.transport.close()
    return [before[0], before[1], full, client.calls, server.calls, bytes(server.received) == MUCH]


@scenario
async def write_eof_behind_a_full_buffer(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder(keep_open=True)
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.write(MUCH)
        client.transport.write_eof()
        server.transport.resume_reading()
        await server.until_called("eof")
        server.transport.write(b"got it")
        server.transport.close()
    return [client.calls, server.calls, len(server.received), bytes(client.received)]


@scenario
async def close_behind_a_full_buffer(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.write(MUCH)
        client.transport.close()
        await round_trip(loop)
        before = [*client.calls]
        server.transport.resume_reading()
    return [before, client.calls, server.calls, len(server.received)]


@scenario
async def abort_behind_a_full_buffer_cuts(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.write(MUCH)
        client.transport.close()
        client.transport.abort()
        await client.until_lost()
        server.transport.resume_reading()
    return [client.calls, server.calls, 0 < len(server.received) < len(MUCH)]


@scenario
async def paused_reader_sees_the_end_when_it_resumes(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        client.transport.pause_reading()
        client.transport.pause_reading()
        server.transport.write(b"last words")
        server.transport.close()
        await server.until_lost()
        await round_trip(loop)
        before = [*client.calls]
        client.transport.resume_reading()
    return [before, client.calls, server.calls, bytes(client.received)]


@scenario
async def abort_with_nothing_unread_is_a_fin(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        client.transport.abort()
    return [client.calls, server.calls]


@scenario
async def abort_with_bytes_unread_is_a_reset(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.write(b"never read")
        await round_trip(loop)
        server.transport.abort()
    return [client.calls, server.calls]


@scenario
async def close_with_bytes_unread_is_a_reset(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.write(b"never read")
        await round_trip(loop)
        server.transport.close()
    return [client.calls, server.calls]


@scenario
async def bytes_before_a_reset_can_still_be_read(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.pause_reading()
        client.transport.write(b"never read")
        server.transport.write(b"last words")
        await round_trip(loop)
        server.transport.close()
        await round_trip(loop)
        before = [*client.calls]
        client.transport.resume_reading()
    return [before, client.calls, server.calls, bytes(client.received)]


@scenario
async def a_blocked_writer_feels_a_reset(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        server.transport.pause_reading()
        client.transport.pause_reading()
        client.transport.write(MUCH)
        await round_trip(loop)
        server.transport.abort()
    return [client.calls, server.calls]


@scenario
async def a_paused_end_feels_a_reset_when_it_writes(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        client.transport.pause_reading()
        server.transport.pause_reading()
        client.transport.write(b"never read")
        await round_trip(loop)
        server.transport.abort()
        await round_trip(loop)
        before = [*client.calls]
        client.transport.write(b"anyone?")
    return [before, client.calls, server.calls]


@scenario
async def writing_to_a_closed_peer_fails_the_second_time(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(keep_open=True), Recorder()
    async with pair(loop, client, server):
        server.transport.close()
        await client.until_called("eof")
        client.transport.write(b"first")
        await round_trip(loop)
        before = [*client.calls]
        client.transport.write(b"second")
    return [before, client.calls, server.calls]


@scenario
async def calls_after_the_end_do_nothing(loop: asyncio.AbstractEventLoop) -> Seen:
    client, server = Recorder(), Recorder()
    async with pair(loop, client, server):
        client.transport.close()
        client.transport.close()
        client.transport.abort()
        client.transport.write(b"unheard")
        client.transport.write_eof()
        client.transport.pause_reading()
        client.transport.resume_reading()
    return [client.calls, server.calls, len(server.received)]


@scenario
async def an_error_in_data_received_ends_the_connection(loop: asyncio.AbstractEventLoop) -> Seen:
    reported: list[str] = []
    loop.set_exception_handler(
        lambda _, context: reported.append(type(context["exception"]).__name__)
    )

    def fail(_: Recorder, __: bytes) -> None:
        raise ZeroDivisionError

    client, server = Recorder(), Recorder(on_data=fail)
    async with pair(loop, client, server):
        client.transport.write(b"trigger")
    return [client.calls, server.calls, reported]


@scenario
async def an_error_in_pause_writing_is_only_reported(loop: asyncio.AbstractEventLoop) -> Seen:
    reported: list[str] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["message"]))

    class Failing(Recorder):
        def pause_writing(self) -> None:
            raise ZeroDivisionError

    client, server = Failing(), Recorder()
    async with pair(loop, client, server):
        client.transport.write(MUCH)
        client.transport.close()
    return [client.calls, server.calls, len(server.received), len(reported)]


@scenario
async def a_refused_connect(loop: asyncio.AbstractEventLoop) -> Seen:
    listener = await loop.create_server(Recorder, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    try:
        await loop.create_connection(Recorder, "127.0.0.1", port)
    except OSError as error:
        return [type(error).__name__, error.errno or 0]
    return ["connected"]


@scenario
async def an_address_in_use(loop: asyncio.AbstractEventLoop) -> Seen:
    listener = await loop.create_server(Recorder, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        await loop.create_server(Recorder, "127.0.0.1", port)
    except OSError as error:
        return [type(error).__name__, error.errno or 0]
    finally:
        listener.close()
    return ["bound"]


@scenario
async def streams(loop: asyncio.AbstractEventLoop) -> Seen:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(shout, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    listener.close()
    return [answer]


def on_a_real_loop(subject: Scenario, loop: asyncio.AbstractEventLoop) -> Seen:
    try:
        return loop.run_until_complete(asyncio.wait_for(subject(loop), timeout=10))
    finally:
        loop.close()


@pytest.mark.skipif(sys.platform != "linux", reason="resets are modelled after Linux's")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("subject", SCENARIOS, ids=lambda subject: subject.__name__)
def test_a_scenario_calls_the_protocols_as_on_real_sockets(
    subject: Scenario, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    real = on_a_real_loop(subject, new_loop())
    assert real  # A scenario that sees nothing proves nothing.

    async def main(loop: asyncio.AbstractEventLoop) -> Seen:
        return await subject(loop)

    assert run(main, seed=1, abort_resets=False) == real
