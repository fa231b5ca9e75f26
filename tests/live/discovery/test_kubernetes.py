"""EndpointSlices over HTTP: listed, watched, and listed again."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.live.discovery.api_server import ApiServer, endpoint, slice_of
from tests.live.opcodes import counted
from tests.support.certificate import make_certificate
from tests.support.played import played_by
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.discovery.kubernetes import (
    ApiClient,
    ExpiredError,
    KubernetesSlices,
    Slices,
    WatchError,
)
from balanceroute.proxy.live.discovery.sources import make_sources
from balanceroute.proxy.live.engines.instances import Role
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
        (source,) = make_sources(settings, random.Random(5), follows=False)
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


# Engines in EndpointSlices.


def listed(*slices: dict[str, Any], role: Role | None = None) -> Slices:
    known = Slices(role)
    known.replace([{"metadata": {"resourceVersion": "7"}, "items": list(slices)}])
    return known


def line(kind: str, thing: dict[str, Any], version: int = 8) -> bytes:
    thing.setdefault("metadata", {})["resourceVersion"] = str(version)
    return json.dumps({"type": kind, "object": thing}).encode()


def shown(known: Slices) -> list[str]:
    """Return the engines, by their addresses."""
    return [
        f"{one.target.role.value} {one.target.url}"
        + ("" if one.ready else " not ready")
        + (" leaving" if one.leaving else "")
        for one in sorted(known.view().values(), key=lambda one: one.target.url)
    ]


def test_roles_are_those_of_the_label_and_the_port_is_that_of_the_api() -> None:
    known = listed(
        slice_of("p", "prefill", [endpoint("10.0.0.1")]),
        slice_of("d", "decode", [endpoint("10.0.0.2"), endpoint("fd00::3")], port=8200),
    )
    assert known.version == "7"
    assert shown(known) == [
        "prefill http://10.0.0.1:8000",
        "decode http://10.0.0.2:8200",
        "decode http://[fd00::3]:8200",
    ]


def test_conditions_tell_who_is_ready_and_who_is_leaving() -> None:
    known = listed(
        slice_of("d", "decode", [endpoint("10.0.0.1", ready=False)]),
        slice_of("e", "decode", [endpoint("10.0.0.2", ready=False, terminating=True)]),
        # Without conditions an endpoint is ready.
        slice_of("f", "decode", [{"addresses": ["10.0.0.3"]}]),
    )
    assert shown(known) == [
        "decode http://10.0.0.1:8000 not ready",
        "decode http://10.0.0.2:8000 not ready leaving",
        "decode http://10.0.0.3:8000",
    ]


def test_a_pod_with_addresses_of_two_families_is_one_engine() -> None:
    four, six = endpoint("10.0.0.1"), endpoint("fd00::1")
    six["targetRef"] = four["targetRef"]
    alone = endpoint("fd00::2")
    known = listed(
        slice_of("a6", "decode", [six, alone], family="IPv6"), slice_of("b4", "decode", [four])
    )
    both = ["decode http://10.0.0.1:8000", "decode http://[fd00::2]:8000"]
    assert shown(known) == both
    assert known.apply(line("DELETED", slice_of("b4", "decode", [])))
    assert shown(known) == ["decode http://[fd00::1]:8000", both[1]]
    assert known.apply(line("ADDED", slice_of("b4", "decode", [four])))
    assert shown(known) == both


def test_an_endpoint_in_two_slices_leaves_if_one_says_so() -> None:
    leaving = endpoint("10.0.0.1", terminating=True)
    for pair in ([leaving], [endpoint("10.0.0.1")]), ([endpoint("10.0.0.1")], [leaving]):
        known = listed(
            *(slice_of(name, "decode", one) for name, one in zip("ab", pair, strict=True))
        )
        assert shown(known) == ["decode http://10.0.0.1:8000 leaving"]


def test_a_pod_that_gets_the_address_of_one_that_ends_waits_for_its_end() -> None:
    old, new = endpoint("10.0.0.1", terminating=True), endpoint("10.0.0.1", ready=False)
    new["targetRef"] = {"uid": "new"}
    known = listed(slice_of("d", "decode", [old, new]))
    assert shown(known) == ["decode http://10.0.0.1:8000 leaving"]
    known.apply(line("MODIFIED", slice_of("d", "decode", [new])))
    assert shown(known) == ["decode http://10.0.0.1:8000 not ready"]
    known.apply(line("MODIFIED", slice_of("d", "decode", [])))
    assert shown(known) == []


def test_random_changes_leave_what_a_list_of_the_same_slices_gives() -> None:
    rng, known = random.Random(3), listed()
    slices: dict[str, dict[str, Any]] = {}
    for _ in range(400):
        name, family = rng.choice([("a", "IPv4"), ("b", "IPv4"), ("c", "IPv6"), ("d", "IPv6")])
        kind = "DELETED" if name in slices and rng.random() < 0.2 else "MODIFIED"
        ends = []
        for pod in rng.sample(range(5), rng.randrange(4)):
            # Two pods have the same address.
            host = f"10.0.0.{pod % 4}" if family == "IPv4" else f"fd00::{pod % 4}"
            end = endpoint(host, ready=rng.random() < 0.9, terminating=rng.random() < 0.3)
            ends.append(end | {"targetRef": {"uid": f"pod {pod}"}})
        one = slice_of(name, rng.choice(["prefill", "decode"]), ends, family=family)
        known.apply(line(kind, one))
        slices.pop(name, None)
        if kind == "MODIFIED":
            slices[name] = one
        assert set(shown(known)) == set(shown(listed(*slices.values())))


def test_a_change_costs_what_it_touches() -> None:
    def cost(slices: int) -> int:
        ends = [[endpoint(f"10.0.{number // 200}.{number % 200}")] for number in range(slices)]
        known = listed(*(slice_of(f"d{at}", "decode", end) for at, end in enumerate(ends)))
        change = line("MODIFIED", slice_of("d0", "decode", [endpoint("10.9.0.1")]))
        opcodes = Counter[str]()
        with counted(opcodes):
            known.apply(change)
            view = known.view()
        assert len(view) == slices
        return opcodes.total()

    assert cost(10) == cost(1_000)


@pytest.mark.parametrize(
    "change",
    [
        {"ports": None},
        {"ports": [{"name": "a", "port": 1}, {"name": "b", "port": 2}]},
        {"ports": [{"name": "api"}]},
        {"ports": [{"name": "api", "port": 70_000}]},
        {"ports": {"api": 1}},
        {"ports": "api"},
        {"endpoints": 5},
        {"endpoints": ["10.0.0.1"]},
        {"addressType": "FQDN"},
        {"endpoints": None},
        {"endpoints": [{"addresses": []}, {"addresses": ["a b"]}, {}]},
    ],
)
def test_what_cannot_be_reached_is_left_out(change: dict[str, Any]) -> None:
    assert shown(listed(slice_of("d", "decode", [endpoint("10.0.0.1")]) | change)) == []


def test_a_slice_without_a_role_is_left_out_unless_the_setting_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = slice_of("d", "both", [endpoint("10.0.0.1")])
    known = listed(one)
    assert shown(known) == shown(known) == []
    assert caplog.messages == ["an EndpointSlice is left out"]
    assert shown(listed(one, role=Role.DECODE)) == ["decode http://10.0.0.1:8000"]


def test_the_only_port_needs_no_name_and_may_have_tls() -> None:
    one = slice_of("d", "decode", [endpoint("10.0.0.1")])
    one["ports"] = [{"port": 8443, "appProtocol": "https"}]
    assert shown(listed(one)) == ["decode https://10.0.0.1:8443"]


def test_changes_are_applied_and_bookmarks_move_the_version() -> None:
    known = listed(slice_of("d", "decode", [endpoint("10.0.0.1")]))
    assert known.apply(line("ADDED", slice_of("e", "decode", [endpoint("10.0.0.2")]), 8))
    assert known.apply(line("MODIFIED", slice_of("d", "decode", [endpoint("10.0.0.3")]), 9))
    assert shown(known) == ["decode http://10.0.0.2:8000", "decode http://10.0.0.3:8000"]
    assert known.apply(line("DELETED", slice_of("d", "decode", []), 10))
    assert not known.apply(line("BOOKMARK", {}, 15))
    assert known.version == "15"
    assert shown(known) == ["decode http://10.0.0.2:8000"]


@pytest.mark.parametrize(
    ("code", "error"), [(410, ExpiredError), (500, WatchError), (None, WatchError)]
)
def test_an_error_in_a_watch_is_raised(code: int | None, error: type[Exception]) -> None:
    known = listed()
    status = {"kind": "Status", "code": code, "message": "too old"}
    with pytest.raises(error, match="too old"):
        known.apply(json.dumps({"type": "ERROR", "object": status}).encode())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"type": "ERROR", "object": []}',
        b'{"type": "ADDED", "object": {"metadata": {}}}',
        b"[" * 10**5,
    ],
)
def test_what_is_no_change_is_an_error(text: bytes) -> None:
    with pytest.raises(WatchError, match="no change of an EndpointSlice"):
        listed().apply(text)


@pytest.mark.parametrize("page", [{}, {"items": [{}], "metadata": {"resourceVersion": "1"}}, []])
def test_what_is_no_list_is_an_error(page: Any) -> None:
    with pytest.raises(WatchError, match="no list of EndpointSlices"):
        Slices(None).replace([page])
