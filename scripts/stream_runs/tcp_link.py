"""The kernel's TCP over a thin link: two network namespaces, and the link between their TUN devices."""

import asyncio
import ctypes
import fcntl
import os
import random
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from spread_load import LINK, Kind, Planned

from balanceroute.proxy.testing.virtual.datagrams import ThinLink

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
# As large as the packets of QUIC.
_PACKET_BYTES = 1_228
_NEAR, _FAR, _PORT = "10.213.7.1", "10.213.7.2", 7_000
_LENGTH = struct.Struct("!I")
_LIMIT_S = 90.0


class LinkError(Exception):
    """There can be no such link on this machine."""


def tcp_run(planned: Sequence[Planned], *, seed: int, shared: bool) -> list[tuple[Kind, float]]:
    """Send the requests over TCP, in real time; return the class and the time of each.

    Args:
        planned: The requests, by time.
        seed: Decides what is lost.
        shared: Whether all go over one connection.

    Raises:
        LinkError: No link can be made.
    """
    with _namespaces() as (near, far):
        return asyncio.run(_run(planned, seed, near, far, shared=shared))


@contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    names = [f"thin{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        yield names[0], names[1]
    finally:
        for name in names:
            with suppress(LinkError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError as error:
        raise LinkError(str(error)) from None
    if done.returncode:
        raise LinkError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def _within(name: str) -> Iterator[None]:
    """What is opened here belongs to a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(Path("/run/netns") / name, os.O_RDONLY)
    try:
        if libc.setns(other, _CLONE_NEWNET):
            raise LinkError(os.strerror(ctypes.get_errno()))
        yield
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)
        os.close(other)


def _device(name: str, own: str, peer: str) -> int:
    """Return a TUN device of a namespace that leads to the other address."""
    with _within(name):
        try:
            number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            wanted = struct.pack("16sH", b"thin0", _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(number, _TUNSETIFF, wanted)
        except OSError as error:
            raise LinkError(f"/dev/net/tun: {error.strerror}") from None
    within = ("netns", "exec", name, "ip")
    _ip(*within, "addr", "add", own, "peer", peer, "dev", "thin0")
    _ip(*within, "link", "set", "thin0", "mtu", str(_PACKET_BYTES), "up")
    return number


async def _run(
    planned: Sequence[Planned], seed: int, near: str, far: str, *, shared: bool
) -> list[tuple[Kind, float]]:
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    devices = [_device(near, _NEAR, _FAR), _device(far, _FAR, _NEAR)]
    # A packet has its heads already.
    links = [ThinLink(replace(LINK, overhead_bytes=0), rng) for _ in devices]

    def carry(side: int) -> None:
        with suppress(BlockingIOError):
            while True:
                packet = os.read(devices[side], 65_536)
                at_s = links[side].offer(len(packet), loop.time())
                if at_s is not None:
                    loop.call_at(at_s, os.write, devices[1 - side], packet)

    for side, device in enumerate(devices):
        loop.add_reader(device, carry, side)
    with _within(far):
        listening = _socket()
        listening.bind((_FAR, _PORT))
    echoing: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        echoing.add(loop.create_task(_echo(reader, writer)))

    server = await asyncio.start_server(accept, sock=listening)
    try:
        async with asyncio.timeout(_LIMIT_S):
            await _exchange(Planned(Kind("", 1, 0.0, 3), 0.0), *await _connect(near))
            times = await (_over_one if shared else _over_many)(planned, near)
            await asyncio.gather(*echoing)
    finally:
        server.close()
        for device in devices:
            loop.remove_reader(device)
        await asyncio.sleep(0.2)  # What is on its way still finds the devices.
        for device in devices:
            os.close(device)
    return [(one.kind, time_s) for one, time_s in zip(planned, times, strict=True)]


def _socket() -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setblocking(False)
    return one


async def _connect(near: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with _within(near):
        one = _socket()
    await asyncio.get_running_loop().sock_connect(one, (_FAR, _PORT))
    return await asyncio.open_connection(sock=one)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(_LENGTH.size)
            writer.write(head + await reader.readexactly(_LENGTH.unpack(head)[0]))
    writer.close()


async def _exchange(
    one: Planned, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(_LENGTH.pack(one.kind.size) + bytes(one.kind.size))
    await reader.readexactly(_LENGTH.size + one.kind.size)
    writer.close()


async def _over_many(planned: Sequence[Planned], near: str) -> list[float]:
    loop = asyncio.get_running_loop()
    begin_s = loop.time()

    async def alone(one: Planned) -> float:
        await asyncio.sleep(max(0.0, begin_s + one.at_s - loop.time()))
        await _exchange(one, *await _connect(near))
        return loop.time() - begin_s - one.at_s

    return await asyncio.gather(*(alone(one) for one in planned))


async def _over_one(planned: Sequence[Planned], near: str) -> list[float]:
    loop = asyncio.get_running_loop()
    reader, writer = await _connect(near)
    begin_s = loop.time()

    async def send() -> None:
        for one in planned:
            await asyncio.sleep(max(0.0, begin_s + one.at_s - loop.time()))
            writer.write(_LENGTH.pack(one.kind.size) + bytes(one.kind.size))

    sending = asyncio.create_task(send())
    times = []
    for one in planned:
        await reader.readexactly(_LENGTH.size + one.kind.size)
        times.append(loop.time() - begin_s - one.at_s)
    await sending
    writer.close()
    return times
