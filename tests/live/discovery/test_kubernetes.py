"""EndpointSlices over HTTP: listed, watched, and listed again."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.live.discovery.api_server import ApiServer, endpoint, slice_of
from tests.support.certificate import make_certificate
from tests.support.played import played_by
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.discovery.kubernetes import ApiClient, KubernetesSlices
from balanceroute.proxy.live.discovery.sources import make_sources
from balanceroute.proxy.live.security import server_context
from balanceroute.proxy.live.settings.declared import DiscoverySettings, engine_source
from balanceroute.proxy.wire.http1.client import Endpoint


async def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - nothing tells.
            await asyncio.sleep(0.01)


class Watcher:
    """A source of engines, and what it told last."""

    def __init__(self, server: ApiServer, account: Path) -> None:
        self.server = server
        self.told: list[list[str]] = []
        self.source = KubernetesSlices(
            "app=x,tier in (a)",
            "serving",
            None,
            api=ApiClient(lambda: Endpoint("127.0.0.1", server.server.port), account),
            rng=random.Random(5),
        )

    async def until(self, hosts: list[str], limit_s: float = 120.0) -> None:
        await until(lambda: self.told[-1:] == [hosts], limit_s)

    async def run(self) -> None:
        await self.source.run(
            lambda view: self.told.append([one.url.split("/")[2].split(":")[0] for one in view])
        )


Scenario = Callable[[ApiServer, Watcher], Awaitable[None]]


def watch(scenario: Scenario) -> None:
    """Play a scenario of a server with one decode rank, and a watcher of it, in virtual time."""

    async def main(_: VirtualLoop) -> None:
        server = ApiServer()
        await server.start()
        server.put(slice_of("d0", "decode", [endpoint("10.0.0.1")]))
        with TemporaryDirectory() as folder:
            watcher = Watcher(server, Path(folder))
            task = asyncio.create_task(watcher.run())
            await scenario(server, watcher)
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.close()

    run(main, seed=1, limit_s=10_000.0)


watched = played_by(watch, places=2)


@watched()
async def test_changes_arrive_as_they_happen(server: ApiServer, watcher: Watcher) -> None:
    await watcher.until(["10.0.0.1"])
    server.put(slice_of("d1", "decode", [endpoint("10.0.0.2")]))
    await watcher.until(["10.0.0.1", "10.0.0.2"], limit_s=0.1)
    server.delete("d0")
    await watcher.until(["10.0.0.2"], limit_s=0.1)
    assert len(server.requests) == 2
    first = server.requests[0]
    assert b"labelSelector=app%3Dx%2Ctier+in+%28a%29" in first.query
    # A token goes over TLS alone.
    assert first.header(b"authorization") is None


@watched()
async def test_a_watch_that_ends_goes_on_where_it_was(server: ApiServer, watcher: Watcher) -> None:
    await watcher.until(["10.0.0.1"])
    for number in range(2, 8):
        await asyncio.sleep(5.0)
        server.end_watches(broken=number % 2 == 0)
        server.put(slice_of("d0", "decode", [endpoint(f"10.0.0.{number}")]))
        await watcher.until([f"10.0.0.{number}"])
    lists = [one for one in server.requests if b"watch=1" not in one.query]
    assert len(lists) == 1
    assert len(server.requests) == 8


@pytest.mark.parametrize("in_stream", [True, False])
@watched()
async def test_what_is_gone_is_listed_again(
    server: ApiServer, watcher: Watcher, in_stream: bool
) -> None:
    await watcher.until(["10.0.0.1"])
    if in_stream:
        server.expire()
    else:
        server.forget()
        server.end_watches(broken=True)
    # Deleted while nobody watched: only a list shows it.
    server.delete("d0")
    server.forget()
    server.put(slice_of("d1", "decode", [endpoint("10.0.0.9")]))
    await watcher.until(["10.0.0.9"])
    lists = [one for one in server.requests if b"watch=1" not in one.query]
    assert len(lists) == 2


@watched()
async def test_a_bookmark_saves_the_list(server: ApiServer, watcher: Watcher) -> None:
    await watcher.until(["10.0.0.1"])
    await asyncio.sleep(1.0)
    server.forget()
    server.bookmark()
    await asyncio.sleep(1.0)
    server.end_watches()
    server.put(slice_of("d1", "decode", [endpoint("10.0.0.2")]))
    await watcher.until(["10.0.0.1", "10.0.0.2"])
    lists = [one for one in server.requests if b"watch=1" not in one.query]
    assert len(lists) == 1


@watched()
async def test_lists_come_in_pages(server: ApiServer, watcher: Watcher) -> None:
    server.page_items = 2
    for number in range(1, 5):
        server.put(slice_of(f"d{number}", "decode", [endpoint(f"10.0.1.{number}")]))
    await watcher.until(["10.0.0.1", *(f"10.0.1.{number}" for number in range(1, 5))])


@watched()
async def test_what_was_told_holds_while_the_server_fails(
    server: ApiServer, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    await watcher.until(["10.0.0.1"])
    for status in (403, 500):
        server.failure = status
        server.end_watches(broken=True)
        before = len(server.requests)
        await asyncio.sleep(300.0)
        # It is not asked again and again.
        assert 30 < len(server.requests) - before < 70
        assert watcher.told[-1] == ["10.0.0.1"]
        server.failure = 0
        server.put(slice_of("d0", "decode", [endpoint("10.0.0.1")]))
        await until(lambda: len(server.watches) == 1, limit_s=10.1)
    reasons = {record.__dict__["fields"]["reason"] for record in caplog.records}
    assert {"status 403: it fails", "status 500: it fails"} <= reasons


@watched()
async def test_a_server_that_ends_each_watch_at_once_is_not_flooded(
    server: ApiServer, watcher: Watcher
) -> None:
    await watcher.until(["10.0.0.1"])
    for _ in range(6_000):
        server.end_watches()
        await asyncio.sleep(0.01)
    assert len(server.requests) < 20


@watched()
async def test_a_server_that_falls_silent_is_noticed_and_told(
    server: ApiServer, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    await watcher.until(["10.0.0.1"])
    await asyncio.sleep(60.0)
    server.bookmark()
    server.silent = True
    server.watches.clear()  # It tells nothing, and does not end.
    await until(lambda: bool(caplog.records), limit_s=120.0)
    assert caplog.records[0].levelname == "WARNING"
    assert "no answer" in caplog.records[0].__dict__["fields"]["reason"]
    assert watcher.told[-1] == ["10.0.0.1"]
    server.silent = False
    server.put(slice_of("d0", "decode", [endpoint("10.0.0.2")]))
    await watcher.until(["10.0.0.2"], limit_s=26.0)


@watched()
async def test_a_watch_that_a_server_forgot_begins_again(
    server: ApiServer, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    await watcher.until(["10.0.0.1"])
    await asyncio.sleep(1.0)
    server.watches.clear()
    server.put(slice_of("d0", "decode", [endpoint("10.0.0.2")]))
    await watcher.until(["10.0.0.2"], limit_s=91.0)
    # A quiet server without bookmarks is nothing to warn of.
    await asyncio.sleep(300.0)
    assert not caplog.records


@watched()
async def test_bookmarks_keep_a_watch(server: ApiServer, watcher: Watcher) -> None:
    await watcher.until(["10.0.0.1"])
    for _ in range(10):
        await asyncio.sleep(60.0)
        server.bookmark()
    assert len(server.requests) == 2


def test_a_list_without_an_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("balanceroute.proxy.live.discovery.kubernetes._MOST_PAGES", 3)

    async def scenario(server: ApiServer, watcher: Watcher) -> None:
        server.page_items = 1
        for number in range(1, 5):
            server.put(slice_of(f"d{number}", "decode", [endpoint(f"10.0.1.{number}")]))
        await until(lambda: bool(caplog.records))
        assert "more than 3 pages" in caplog.records[0].__dict__["fields"]["reason"]
        server.page_items = 2
        await until(lambda: [len(one) for one in watcher.told[-1:]] == [5])

    watch(scenario)


Secured = Callable[[ApiServer, Path, asyncio.Event], Awaitable[None]]


def over_tls(account: Path, scenario: Secured) -> None:
    """Play a scenario of a server with TLS and a source that follows it; the event says that it told."""
    cert, key = make_certificate(account)
    cert.rename(account / "ca.crt")
    (account / "namespace").write_text("serving\n")
    (account / "token").write_text("first\n")

    async def main() -> None:
        server = ApiServer()
        await server.start(ssl=server_context(account / "ca.crt", key))
        server.put(slice_of("d0", "decode", [endpoint("10.0.0.1")]))
        settings = DiscoverySettings(
            discover=(engine_source("kubernetes:app=x"),),
            kubernetes_api=f"https://127.0.0.1:{server.server.port}",
            kubernetes_account=account,
        )
        (source,) = make_sources(settings, random.Random(5), hears=False)
        told = asyncio.Event()
        task = asyncio.create_task(source.run(lambda _: told.set()))
        await until(lambda: bool(server.watches))
        await scenario(server, account, told)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.close()

    asyncio.run(main())


def test_over_tls_with_the_token_of_the_account(tmp_path: Path) -> None:
    async def scenario(server: ApiServer, account: Path, told: asyncio.Event) -> None:
        assert told.is_set()
        # Tokens are replaced before they expire, and one that cannot be sent ends nothing.
        for token in (b"second\n", b"\xff", b"a\nb", b"third"):
            (account / "token").write_bytes(token)
            count = len(server.requests)
            server.end_watches(broken=True)
            if token.strip().isalpha():
                await until(lambda before=count: len(server.requests) > before)  # type: ignore[misc]
        tokens = [one.header(b"authorization") for one in server.requests]
        assert (tokens[0], tokens[-1]) == (b"Bearer first", b"Bearer third")

    over_tls(tmp_path, scenario)


def test_a_renewed_certificate_of_the_cluster_is_followed(tmp_path: Path) -> None:
    async def scenario(server: ApiServer, account: Path, told: asyncio.Event) -> None:
        renewed = account / "renewed"
        renewed.mkdir()
        cert, key = make_certificate(renewed)
        port = server.server.port
        await server.close()
        told.clear()
        # The server has its new certificate first, and is not trusted until the account's folder has it too.
        await server.start(ssl=server_context(cert, key), port=port)
        server.put(slice_of("d0", "decode", [endpoint("10.0.0.2")]))
        count = len(server.requests)
        await asyncio.sleep(1.0)
        assert len(server.requests) == count
        cert.rename(account / "ca.crt")
        await until(told.is_set)

    over_tls(tmp_path, scenario)
