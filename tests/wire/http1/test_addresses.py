"""Names of engines: resolved now and then, and not lost when the resolver is."""

import asyncio
import errno
import logging
import random
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.support.played import played_by
from tests.support.virtual.addresses import Connect, Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run as run_virtually

from balanceroute.proxy.live.engines.engine_url import Fault, fault_of
from balanceroute.proxy.live.engines.health import Health, HealthSettings
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import WireError, WireFault

PORT = 8000
TTL_S = 5.0
AGAIN = socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
NO_NAME = socket.gaierror(socket.EAI_NONAME, "name or service not known")


class Resolver:
    """Returns given answers."""

    def __init__(self, answer: list[str] | Exception | None) -> None:
        self.answer = answer  # Addresses, or what is raised, or None to be silent.
        self.asked = 0  # How often.

    async def __call__(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("engine", PORT)
        self.asked += 1
        if self.answer is None:
            await asyncio.sleep(3_600.0)
            raise AGAIN
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Site:
    """Engines that answer with their address, and an endpoint that knows a name."""

    def __init__(self, loop: VirtualLoop, resolver: Resolver) -> None:
        self.loop = loop
        self.resolver = resolver
        self.endpoint = Endpoint("engine", PORT, resolve=resolver, idle_timeout_s=0.5)
        self._servers: dict[str, Server] = {}

    async def serve(self, address: str) -> None:
        server = Server(lambda _, reply: reply.send(200, [], address.encode()))
        await server.start(address, PORT)
        self._servers[address] = server

    def stop(self, address: str) -> None:
        self._servers.pop(address).close()

    async def who(self) -> str:
        """Return who answers on a fresh connection."""
        await asyncio.sleep(1.0)
        answer = await fetch(self.endpoint, b"GET", b"/", [], b"", timeout_s=60.0, max_bytes=99)
        return answer.body.decode()

    async def fault(self) -> WireFault:
        """Return how an exchange fails."""
        with pytest.raises(WireError) as caught:
            await self.who()
        assert not caught.value.sent
        return caught.value.kind

    def close(self) -> None:
        self.endpoint.close()
        for server in self._servers.values():
            server.close()


Play = Callable[[Site], Coroutine[Any, Any, None]]


def play(scene: Play, answer: list[str] | Exception | None = None) -> None:
    async def main(loop: VirtualLoop) -> None:
        site = Site(loop, Resolver(answer))
        await site.serve("127.0.0.1")
        try:
            await scene(site)
        finally:
            site.close()
            await asyncio.sleep(4_000.0)  # For what asks a silent resolver.

    run_virtually(main, seed=1, limit_s=100_000.0)


played = played_by(play)


def test_the_last_good_address_is_used_while_the_name_does_not_resolve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A resolver that fails takes no engine away."""

    async def scene(site: Site) -> None:
        assert await site.who() == "127.0.0.1"
        for site.resolver.answer in (AGAIN, NO_NAME, None):
            begin_s = site.loop.time()
            for _ in range(12):
                assert await site.who() == "127.0.0.1"
            # A resolver that is silent is waited for a second, and not by every connection.
            assert site.loop.time() - begin_s < 12 + 4
        site.resolver.answer = ["127.0.0.1"]

    with caplog.at_level(logging.WARNING):
        play(scene, ["127.0.0.1"])
    assert caplog.messages == ["a name does not resolve; its last address is used"]


def test_a_name_is_not_resolved_for_every_connection() -> None:
    async def scene(site: Site) -> None:
        for _ in range(20):
            await site.who()
        assert 4 <= site.resolver.asked <= 5

    play(scene, ["127.0.0.1"])


def test_connections_that_open_together_ask_once() -> None:
    async def scene(site: Site) -> None:
        await asyncio.gather(*(site.who() for _ in range(50)))
        assert site.resolver.asked == 1

    play(scene, ["127.0.0.1"])


def test_an_engine_that_moves_is_found_after_a_while() -> None:
    async def scene(site: Site) -> None:
        await site.serve("127.0.0.2")
        assert await site.who() == "127.0.0.1"
        site.resolver.answer = ["127.0.0.2"]
        assert await site.who() == "127.0.0.1"
        await asyncio.sleep(TTL_S)
        assert await site.who() == "127.0.0.2"

    play(scene, ["127.0.0.1"])


def test_an_engine_that_moved_is_found_once_its_old_address_refuses() -> None:
    async def scene(site: Site) -> None:
        await site.serve("127.0.0.2")
        assert await site.who() == "127.0.0.1"
        site.stop("127.0.0.1")
        site.resolver.answer = ["127.0.0.2"]
        assert await site.fault() is WireFault.CONNECT
        assert await site.who() == "127.0.0.2"

    play(scene, ["127.0.0.1"])


@pytest.mark.both_loops
def test_every_address_is_tried() -> None:
    async def scene(site: Site) -> None:
        assert await site.who() == "127.0.0.1"
        site.stop("127.0.0.1")
        assert await site.fault() is WireFault.CONNECT

    play(scene, ["127.0.0.9", "127.0.0.1"])


@pytest.mark.parametrize("silent", [1, 2])
def test_a_silent_address_does_not_take_the_time_of_the_others(silent: int) -> None:
    """It took all of it, each time: the engine was down although it answered at another address."""

    async def scene(site: Site) -> None:
        network = site.loop.network
        assert isinstance(site.resolver.answer, list)
        addresses = site.resolver.answer
        for address in addresses[:silent]:
            network.rule(address, PORT, Link(connect=Connect.HANG))
        begin_s = site.loop.time()
        assert await site.who() == "127.0.0.1"
        assert site.loop.time() - begin_s < 1.0 + 5.0 * silent / (silent + 1) + 0.1
        # From then on they come last, also when the name is resolved again.
        begin_s = site.loop.time()
        for _ in range(10):
            assert await site.who() == "127.0.0.1"
        assert site.loop.time() - begin_s < 10.1
        assert site.resolver.asked > 1
        # When the one that answered is gone, the others are tried.
        site.stop("127.0.0.1")
        assert await site.fault() is WireFault.CONNECT_TIMEOUT
        network.rule(addresses[0], PORT, None)
        await site.serve(addresses[0])
        assert await site.who() == addresses[0]

    play(scene, [f"127.0.0.{9 - number}" for number in range(silent)] + ["127.0.0.1"])


def test_addresses_that_flap_cost_no_request() -> None:
    async def scene(site: Site) -> None:
        await site.serve("127.0.0.2")
        both = ["127.0.0.1", "127.0.0.2"]
        answers: list[list[str] | Exception | None] = [
            both,
            AGAIN,
            both[1:],
            [],
            both[::-1],
            NO_NAME,
        ]
        for round_ in range(60):
            site.resolver.answer = answers[round_ % len(answers)]
            assert await site.who() in both
            await asyncio.sleep(TTL_S)

    play(scene, ["127.0.0.1"])


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (AGAIN, WireFault.NO_ADDRESS),
        ([], WireFault.NO_ADDRESS),
        (None, WireFault.NO_ADDRESS),
        (NO_NAME, WireFault.CONNECT),
    ],
    ids=["failure", "no address", "silence", "no such name"],
)
def test_a_name_that_never_resolved(answer: list[str] | Exception | None, kind: WireFault) -> None:
    async def scene(site: Site) -> None:
        assert await site.fault() is kind
        assert await site.fault() is kind

    play(scene, answer)


@pytest.mark.both_loops
@played()
async def test_a_call_may_be_aborted_while_its_name_is_resolved(site: Site) -> None:
    with pytest.raises(WireError):
        await fetch(site.endpoint, b"GET", b"/", [], b"", timeout_s=1.0, max_bytes=99)
    await asyncio.sleep(1.0)
    assert site.endpoint.connections == 0


def test_a_resolver_that_fails_quarantines_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One EAI_AGAIN each, and eight of eight engines were quarantined."""

    async def getaddrinfo(*_args: object, **_options: object) -> None:
        raise AGAIN

    async def main() -> list[bool]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        health = Health(
            HealthSettings(2.0, 2.0, quarantine_failures=3),
            fetch=lambda _: asyncio.sleep(0, 200),
            on_error=lambda what, error: pytest.fail(f"{what}: {error!r}"),
            on_change=lambda *_: None,
            on_gone=lambda _: None,
            on_known=lambda _: None,
            clock=loop.time,
            rng=random.Random(0),
        )
        for number in range(8):
            target = Target(Role.DECODE, f"http://engine-{number}:8000")
            health.add(target)
            endpoint = Endpoint(f"engine-{number}", 8000)
            for _ in range(5):
                with pytest.raises(WireError) as caught:
                    await fetch(endpoint, b"GET", b"/", [], b"", timeout_s=60.0, max_bytes=99)
                health.failed(target, fault_of(caught.value))
        return [state.up for state in health.states()]

    assert asyncio.run(main()) == [True] * 8


def test_several_addresses_are_refused_only_if_all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(site: Site) -> None:
        errors = iter([OSError(errno.EHOSTUNREACH, "no route"), ConnectionRefusedError()])

        async def create_connection(*_args: object, **_options: object) -> None:
            raise next(errors)

        monkeypatch.setattr(site.loop, "create_connection", create_connection)
        with pytest.raises(WireError) as caught:
            await site.who()
        assert fault_of(caught.value) is Fault.UNREACHABLE

    play(scene, ["127.0.0.9", "127.0.0.8"])
