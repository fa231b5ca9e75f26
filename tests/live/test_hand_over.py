"""SIGUSR2: a new version takes the listening sockets, on real sockets and with real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.extended import usually
from tests.live.control.test_admin import INSTANCE, ORDERS, PAGES, Bench
from tests.live.served import COMPLETIONS, STREAM, Client, Served, engines, play, serving
from tests.support.played import in_real_time
from tests.support.site import Exchanged

from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.hand_over import Successor

LONG = {**STREAM, "max_tokens": 400}


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_waiting(pid: int) -> bool:
    return b"hand_over.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def mapped_by(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def until_waiting(pid: int) -> None:
    """Wait until a process has become what waits for its successor."""
    while not is_waiting(pid):  # noqa: ASYNC110 - nobody tells.
        await asyncio.sleep(0.01)


async def begin(served: Served) -> int:
    """Have a new version take over; return its number, once it runs.

    Before that the old one waits for it: who stops it then stops both.
    """
    pid = served.process.pid
    served.process.send_signal(signal.SIGUSR2)
    while not (found := children(pid)) or not runs(found[0]):  # noqa: ASYNC110 - nobody tells.
        await asyncio.sleep(0.01)
    return found[0]


def runs(pid: int) -> bool:
    """Return whether a successor was begun to the end: it has the variable that the old one gave it."""
    return b"BALANCEROUTE_HAND_OVER=" in Path(f"/proc/{pid}/environ").read_bytes()


@asynccontextmanager
async def served_by(*flags: str, log: Path, **changes: Any) -> AsyncIterator[Served]:
    """Serve before emulated engines; leave no successor behind."""
    async with (
        engines(**changes) as fleet,
        serving(fleet.prefill_urls, fleet.decode_urls, "--log", str(log), *flags) as served,
    ):
        try:
            yield served
        finally:
            kill_successors(served)


def kill_successors(served: Served) -> None:
    pids = [served.process.pid]
    while pids:
        pids = [child for one in pids for child in children(one)]
        for one in pids:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


async def long_streams(served: Served, count: int) -> list[Exchanged]:
    """Begin streams, and wait until each has brought a few tokens."""
    streams = [served.client.send(b"POST", COMPLETIONS, LONG) for _ in range(count)]
    while not all(len(one.events) > 3 for one in streams):  # noqa: ASYNC110 - none tells.
        await asyncio.sleep(0.005)
    return streams


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def has(log: Path, what: str) -> bool:
    return what in log.read_text()


async def told(log: Path, what: str) -> None:
    """Wait until the log has something."""
    while not has(log, what):  # noqa: ASYNC110 - nobody tells.
        await asyncio.sleep(0.01)


async def policy(served: Served) -> str:
    found: str = (await served.admin.get("/admin/state")).json["state"]["policy"]
    return found


@pytest.mark.parametrize("keeps", usually([True], [False, True]))
@in_real_time()
async def test_a_new_version_takes_over_and_no_request_notices(tmp_path: Path, keeps: bool) -> None:
    log = tmp_path / "log"
    flags = ["--roster-state", str(tmp_path / "roster")] if keeps else []
    async with served_by(*flags, log=log) as served:
        over = asyncio.Event()

        async def keep_asking(*, reuse: bool) -> None:
            client = Client(served.ports()[0])
            while not over.is_set():
                answer = await client.post(COMPLETIONS, STREAM | {"max_tokens": 5})
                assert answer.done, (answer.status, answer.body, answer.error)
                if not reuse:
                    client.close()
            client.close()

        streams = await long_streams(served, 8)
        assert (await served.admin.post("/admin/policy", {"policy": "jsq"})).status == 200
        async with asyncio.TaskGroup() as group:
            for i in range(8):
                group.create_task(keep_asking(reuse=i % 2 == 0))
            await begin(served)
            for one in streams:
                await one.end()
                assert one.done
                assert len(one.events) == 401
            await until_waiting(served.process.pid)
            over.set()
        # It holds next to nothing of a proxy: many updates leave many of them.
        mapped = mapped_by(served.process.pid)
        assert not any(module in mapped for module in ("_asyncio", "_socket", "_json", "uvloop"))
        assert (await served.admin.get("/ready")).status == 200
        assert await policy(served) == "jsq"
        # Signals to the first process reach the one that serves.
        served.process.send_signal(signal.SIGTERM)
        status, printed = await served.exit()
        assert status == 0
        assert printed == f"{served.line}\n"  # The new one's, after the first was read.


@in_real_time()
async def test_versions_follow_each_other_and_the_last_status_is_the_first_ones(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    async with served_by(log=log) as served:
        second = await begin(served)
        await until_waiting(served.process.pid)
        assert (await served.client.post(COMPLETIONS, STREAM)).done
        served.process.send_signal(signal.SIGUSR2)
        await until_waiting(second)
        (third,) = children(second)
        assert (await served.client.post(COMPLETIONS, STREAM)).done
        os.kill(third, signal.SIGKILL)
        assert (await served.exit())[0] == 128 + signal.SIGKILL


def test_a_version_that_does_not_start_leaves_everything_as_it_is(tmp_path: Path) -> None:
    log, keys = tmp_path / "log", tmp_path / "keys"
    keys.write_text("one\n")
    keys.chmod(0o600)

    async def main() -> None:
        async with served_by("--api-key-file", str(keys), log=log) as served:
            keys.write_text("")
            served.process.send_signal(signal.SIGUSR2)
            await told(log, "the new version does not start")
            key = [(b"authorization", b"Bearer one")]
            answer = await served.client.send(b"POST", COMPLETIONS, STREAM, key).end()
            assert answer.done
            assert (await served.admin.post("/admin/policy", {"policy": "jsq"})).status == 200
            assert children(served.process.pid) == []
            keys.write_text("two\n")
            served.process.send_signal(signal.SIGUSR2)
            await told(log, "a new version serves")
            key = [(b"authorization", b"Bearer two")]
            client = Client(served.ports()[0])
            answer = await client.send(b"POST", COMPLETIONS, STREAM, key).end()
            assert answer.done
            client.close()
            served.process.send_signal(signal.SIGTERM)
            assert (await served.exit())[0] == 0

    play(main())


@pytest.mark.parametrize("number", usually([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
@in_real_time()
async def test_a_signal_to_end_reaches_both_once_while_the_old_one_drains(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    async with served_by(log=log) as served:
        old = await long_streams(served, 2)
        pid = await begin(served)
        await told(log, "a new version serves")
        # So a terminal's signals reach it through the first process alone.
        assert os.getpgid(pid) == pid
        client = Client(served.ports()[0])
        new = client.send(b"POST", COMPLETIONS, LONG)
        while len(new.events) < 3:  # noqa: ASYNC110 - nobody tells.
            await asyncio.sleep(0.005)
        served.process.send_signal(number)
        for one in (*old, new):
            await one.end()
            assert one.done
            assert len(one.events) == 401
        client.close()
        assert (await served.exit())[0] == 0


@in_real_time()
async def test_the_end_of_the_old_one_ends_a_new_one_that_does_not_serve_yet(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    async with served_by(log=log) as served:
        pid = await begin(served)
        os.kill(pid, signal.SIGSTOP)
        served.process.send_signal(signal.SIGTERM)
        assert (await served.exit())[0] == 0
        assert not exists(pid)


@in_real_time()
async def test_an_order_while_a_new_version_starts_is_refused_until_that_takes_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    async with served_by(log=log) as served:
        pid = await begin(served)
        os.kill(pid, signal.SIGSTOP)  # So the old one is still asked.
        answer = await served.admin.post("/admin/policy", {"policy": "jsq"})
        assert (answer.status, answer.header(b"retry-after")) == (503, b"1")
        assert "order again" in answer.json["error"]["message"]
        assert await policy(served) == "br-h"
        os.kill(pid, signal.SIGCONT)
        statuses = []
        while 200 not in statuses:
            client = Client(served.ports()[1])
            statuses.append((await client.post("/admin/policy", {"policy": "jsq"})).status)
            client.close()
        assert set(statuses) <= {200, 503}
        await until_waiting(served.process.pid)
        assert await policy(served) == "jsq"
        served.process.send_signal(signal.SIGTERM)
        assert (await served.exit())[0] == 0


SUCCESSOR = """
import json, os, pathlib, signal, sys, time
given, folder = json.loads(os.environ["BALANCEROUTE_HAND_OVER"]), pathlib.Path(sys.argv[1])
signal.signal(signal.SIGHUP, lambda *_: (folder / "hung-up").touch() or sys.exit())
(folder / "orders").write_bytes(open(given["orders"], "rb").read())
(folder / "starts").touch()
while not (folder / "may-serve").exists():
    time.sleep(0.01)
os.write(given["ready"], b"ready\\n")
time.sleep(60)
"""


async def there(path: Path) -> None:
    """Wait until a file is there."""
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - nobody tells.
        await asyncio.sleep(0.01)


def successor(
    *command: str,
    steps: list[str],
    orders: Callable[[], bytes] = bytes,
    failed: Callable[[], None] = lambda: None,
) -> Successor:
    """Return one that notes what it does to the process that it follows."""

    async def stop_orders() -> None:
        steps.append("orders are stopped")

    def note_failure() -> None:
        steps.append("failed")
        failed()

    return Successor(
        [*command],
        public=lambda: [0],
        admin=list,
        stop_orders=stop_orders,
        orders=orders,
        led=lambda: None,
        serves=lambda: steps.append("serves"),
        failed=note_failure,
    )


def test_a_hang_up_while_a_new_version_starts_reaches_it_once_it_serves(tmp_path: Path) -> None:
    """It may have read keys and tenants before they changed."""
    steps: list[str] = []

    def orders() -> bytes:
        steps.append("orders are asked for")
        return b"[1]"

    async def main() -> None:
        new = successor(sys.executable, "-c", SUCCESSOR, str(tmp_path), steps=steps, orders=orders)
        new.begin()
        new.begin()  # It is starting already.
        await there(tmp_path / "starts")
        new.send(signal.SIGHUP)
        (tmp_path / "may-serve").touch()
        await there(tmp_path / "hung-up")
        assert new.took_over is not None
        new.took_over.wait()

    play(main())
    assert steps == ["orders are stopped", "orders are asked for", "serves"]
    assert (tmp_path / "orders").read_bytes() == b"[1]"


def test_orders_are_taken_again_if_a_new_version_cannot_be_started(tmp_path: Path) -> None:
    steps: list[str] = []

    async def main() -> None:
        over = asyncio.Event()
        new = successor(str(tmp_path / "absent"), steps=steps, failed=over.set)
        new.begin()
        await over.wait()
        assert new.took_over is None

    play(main())
    assert steps == ["orders are stopped", "failed"]


CHANGES = [
    ("POST", "/admin/instances"),
    ("POST", "/admin/instances/drain"),
    ("POST", "/admin/instances/remove"),
    ("POST", "/admin/policy"),
    ("POST", "/admin/log-level"),
    ("POST", "/admin/reload"),
    ("POST", "/workers"),
    ("DELETE", "/workers/1"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
]


@pytest.mark.parametrize(("method", "path"), CHANGES)
@in_real_time()
async def test_an_order_that_a_new_version_would_not_be_told_of_is_refused(
    method: str, path: str
) -> None:
    bench = Bench()
    await bench.admin.stop_orders(1.0)
    refused = bench.ask(method, path, ORDERS.get(path, {}))
    assert (refused.status, refused.message) == (
        503,
        "a new version of the proxy is taking over: order again",
    )
    assert refused.headers[b"retry-after"] == b"1"
    assert bench.fleet.orders == []
    # What changes nothing is answered, and what is about requests of this process.
    assert all(bench.get(page).status == 200 for page in PAGES)
    bench.post("/abort_requests", {})
    await asyncio.sleep(0)
    bench.admin.takes_orders = True
    assert bench.ask(method, path, ORDERS.get(path, {})).status != 503


@in_real_time()
async def test_a_new_version_waits_for_the_orders_that_are_being_carried_out() -> None:
    bench = Bench()
    bench.fleet.gate.clear()
    added = bench.post("/admin/instances", INSTANCE)
    stopped = asyncio.ensure_future(bench.admin.stop_orders(60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not stopped.done()
    bench.fleet.gate.set()
    await stopped
    assert added.status == 200
    assert bench.fleet.orders == [("add", Role.DECODE, "http://d:8000", None, None)]
