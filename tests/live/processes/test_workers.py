"""`balanceroute serve --workers`: a supervisor, a scheduler process and relays, on real sockets."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.served import COMPLETIONS, STREAM, Client, Served, engines, play, serving

if TYPE_CHECKING:
    from tests.live.conftest import Exchanged, MakeExchanged

WORKERS = ("--workers", "2")
LONG = {**STREAM, "max_tokens": 400}


def processes(served: Served) -> dict[str, int]:
    """Return the number of each process that the supervisor has started, by name."""
    found = {}
    pid = served.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:  # It has ended since.
            continue
        part = b"".join(word for word in words if word.startswith(b"--process="))
        if not part:  # It has not begun, or has ended.
            continue
        role = b"scheduler" if b'"scheduler"' in part else b"relay"
        number = b"1" if b'"relay":1' in part else b"0"
        found[(role + number).decode()] = int(child)
    return found


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def workers(make_exchanged: "MakeExchanged", *flags: str) -> AsyncIterator[Served]:
    """Serve with two relays before emulated engines."""
    async with (
        engines() as fleet,
        serving(make_exchanged, fleet.prefill_urls, fleet.decode_urls, *WORKERS, *flags) as served,
    ):
        yield served


async def long_streams(served: Served, count: int) -> "list[Exchanged]":
    """Begin streams, and wait until each has brought a few tokens."""
    streams = [served.client.send(b"POST", COMPLETIONS, LONG) for _ in range(count)]
    while not all(len(one.events) > 3 for one in streams):  # noqa: ASYNC110 - none tells.
        await asyncio.sleep(0.005)
    return streams


async def finish(streams: "list[Exchanged]") -> None:
    """Wait until each stream has ended as it should."""
    for one in streams:
        await one.end()
        assert one.done


async def until_free(served: Served) -> None:
    """Wait until no request, slot or KV cache is held for anybody."""
    while True:
        state = (await served.admin.get("/admin/state")).json["state"]
        held = sum(one["held_tokens"] for one in state["prefillers"])
        bound = sum(one["bound"] for one in state["ranks"])
        if not (held or bound or state["queued"] or state["prefilling"] or state["pooled"]):
            return
        await asyncio.sleep(0.01)


def test_several_processes_serve_as_one(make_exchanged: "MakeExchanged", tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def main() -> None:
        async with workers(make_exchanged, "--log", str(log)) as served:
            assert sorted(processes(served)) == ["relay0", "relay1", "scheduler0"]
            exchanges = [served.client.send(b"POST", COMPLETIONS, STREAM) for _ in range(16)]
            for one in exchanges:
                await one.end()
                assert one.done
                assert len(one.events) == 61
            whole = await served.client.post(COMPLETIONS, {**STREAM, "stream": False})
            assert whole.json["usage"]["completion_tokens"] == 60
            for client in (served.client, served.admin):
                for page in ("/health", "/ready", "/metrics"):
                    assert (await client.get(page)).status == 200
            page = (await served.client.get("/metrics")).body.decode()
            assert 'outcome="ok",status="200"} 17.0' in page
            names = re.findall(r'^process_cpu_seconds_total\{process="(.*)"\}', page, re.MULTILINE)
            assert names == ["supervisor", "scheduler", "relay-0", "relay-1"]
            await until_free(served)
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")
            assert log.read_text().count('"message":"request ended"') == 17

    play(main())


def test_sigterm_lets_streams_of_every_relay_finish(make_exchanged: "MakeExchanged") -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            streams = await long_streams(served, 8)
            served.process.send_signal(signal.SIGTERM)
            await finish(streams)
            assert await served.exit() == (0, "")

    play(main())


def test_a_relay_that_is_killed_breaks_its_own_streams_alone(
    make_exchanged: "MakeExchanged",
) -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            streams = await long_streams(served, 16)
            before = processes(served)
            os.kill(before["relay0"], signal.SIGKILL)
            for one in streams:
                await one.end()
            finished = [one for one in streams if one.done]
            # All on one side has a probability of 2 ** -15.
            assert 0 < len(finished) < 16
            assert all(len(one.events) == 401 for one in finished)
            await until_free(served)
            # Nobody is refused: what connects to the dead relay waits for the next one.
            for _ in range(8):
                assert (await served.client.post(COMPLETIONS, STREAM)).done
            after = processes(served)
            assert after["relay0"] != before["relay0"]
            assert (after["relay1"], after["scheduler0"]) == (
                before["relay1"],
                before["scheduler0"],
            )

    play(main())


async def killed_and_stopped(served: Served) -> int:
    """Kill a relay, and stop the one that begins in its place; return the number of that."""
    before = processes(served)["relay0"]
    os.kill(before, signal.SIGKILL)
    while (after := processes(served).get("relay0", before)) == before:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    os.kill(after, signal.SIGSTOP)
    return after


def test_a_relay_that_begins_ends_with_its_supervisor(make_exchanged: "MakeExchanged") -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            others = [pid for name, pid in processes(served).items() if name != "relay0"]
            after = await killed_and_stopped(served)
            served.process.kill()
            while any(map(exists, others)):  # noqa: ASYNC110 - they are not our children.
                await asyncio.sleep(0.01)
            os.kill(after, signal.SIGCONT)
            while exists(after):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    play(main())


def test_others_accept_what_connects_to_a_relay_that_is_gone(
    make_exchanged: "MakeExchanged",
) -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            after = await killed_and_stopped(served)
            # Each has a connection of its own. All on one side has a probability of 2 ** -31.
            for one in [served.client.send(b"POST", COMPLETIONS, STREAM) for _ in range(32)]:
                await one.end()
                assert one.done
            os.kill(after, signal.SIGCONT)
            await until_free(served)

    play(main())


def test_a_process_that_is_replaced_has_the_settings_of_the_others(
    make_exchanged: "MakeExchanged", tmp_path: Path
) -> None:
    topology, keys = tmp_path / "fleet.toml", tmp_path / "keys"
    keys.write_text("one\n")
    keys.chmod(0o600)

    async def main() -> None:
        async with engines() as fleet:
            prefill, decode = fleet.prefill_urls, fleet.decode_urls
            listed = [f'[[prefill]]\nurl = "{url}"\n' for url in prefill]
            listed += [f'[[decode]]\nurl = "{url}"\n' for url in decode]
            topology.write_text("".join(listed) + "[proxy]\nbatch = 4\n")
            flags = [*WORKERS, "--topology", str(topology), "--api-key-file", str(keys)]
            async with serving(make_exchanged, prefill, decode, *flags) as served:
                before = processes(served)
                topology.write_text("nonsense")
                keys.write_text("one\ntwo\n")
                for name in ("relay0", "relay1", "scheduler0"):
                    os.kill(before[name], signal.SIGKILL)
                headers = [(b"authorization", b"Bearer two")]
                late = served.client.send(b"POST", COMPLETIONS, STREAM, headers)
                assert (await late.end()).done, (late.status, late.body, late.error)
                served.process.send_signal(signal.SIGTERM)
                assert await served.exit() == (0, "")

    play(main())


def test_streams_go_on_while_the_scheduler_process_hangs(make_exchanged: "MakeExchanged") -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            streams = await long_streams(served, 8)
            scheduler = processes(served)["scheduler0"]
            os.kill(scheduler, signal.SIGSTOP)
            try:
                await finish(streams)
                late = served.client.send(b"POST", COMPLETIONS, STREAM)
            finally:
                with suppress(ProcessLookupError):  # It has hung for too long, and was replaced.
                    os.kill(scheduler, signal.SIGCONT)
            assert (await late.end()).done
            await until_free(served)

    play(main())


@pytest.mark.slow
def test_a_scheduler_process_that_hangs_for_good_is_replaced(
    make_exchanged: "MakeExchanged",
) -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            streams = await long_streams(served, 8)
            os.kill(processes(served)["scheduler0"], signal.SIGSTOP)
            late = served.client.send(b"POST", COMPLETIONS, STREAM)
            await finish(streams)
            assert (await late.end()).done
            await until_free(served)

    play(main())


def test_streams_go_on_when_the_scheduler_process_is_killed(
    make_exchanged: "MakeExchanged",
) -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            streams = await long_streams(served, 8)
            before = processes(served)
            assert (await served.admin.post("/admin/policy", {"policy": "jsq"})).status == 200
            os.kill(before["scheduler0"], signal.SIGKILL)
            late = served.client.send(b"POST", COMPLETIONS, STREAM)
            await finish(streams)
            assert (await late.end()).done
            after = processes(served)
            assert after["scheduler0"] != before["scheduler0"]
            assert (after["relay0"], after["relay1"]) == (before["relay0"], before["relay1"])
            await until_free(served)
            assert (await served.admin.get("/admin/state")).json["state"]["policy"] == "jsq"

    play(main())


def test_a_new_version_takes_over_and_no_request_notices(make_exchanged: "MakeExchanged") -> None:
    async def main() -> None:
        async with workers(make_exchanged) as served:
            over = asyncio.Event()

            async def keep_asking(*, reuse: bool) -> None:
                client = Client(served.ports()[0], make_exchanged)
                while not over.is_set():
                    answer = await client.post(COMPLETIONS, STREAM | {"max_tokens": 5})
                    assert answer.done, (answer.status, answer.body, answer.error)
                    if not reuse:
                        client.close()
                client.close()

            streams = await long_streams(served, 8)
            old = set(processes(served).values())
            assert (await served.admin.post("/admin/policy", {"policy": "jsq"})).status == 200
            async with asyncio.TaskGroup() as group:
                for i in range(8):
                    group.create_task(keep_asking(reuse=i % 2 == 0))
                served.process.send_signal(signal.SIGUSR2)
                await finish(streams)
                while any(map(exists, old)):  # noqa: ASYNC110 - they are not our children.
                    await asyncio.sleep(0.01)
                assert (await served.admin.get("/ready")).status == 200
                over.set()
            assert len(processes(served)) == 3
            assert (await served.admin.get("/admin/state")).json["state"]["policy"] == "jsq"
            await until_free(served)
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())
