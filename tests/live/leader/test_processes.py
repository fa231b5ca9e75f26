"""Two processes that share a lock, in front of emulated engines: killed, updated and told to end."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.extended import usually
from tests.live.served import COMPLETIONS, STREAM, Client, Served, engines, play, serving
from tests.live.test_hand_over import begin, children, kill_successors, until_waiting


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Served, Served]]:
    """Two proxies, of which the first leads."""
    flags = ("--leader-lock", str(folder / "leader"), "--leader-lease-s", "2", "--batch", "16")
    async with engines() as fleet:
        where = (fleet.prefill_urls, fleet.decode_urls)
        async with serving(*where, *flags) as first:
            try:
                await ready(first)
                async with serving(*where, *flags) as second:
                    yield first, second
            finally:
                kill_successors(first)


async def ready(served: Served) -> None:
    """Wait until it leads."""
    while (await served.client.get("/ready")).status != 200:  # noqa: ASYNC110 - nobody tells.
        await asyncio.sleep(0.02)


def run_two(folder: Path, scenario: Callable[[Served, Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with two(folder) as (first, second):
            while b"follower of" not in (await second.client.get("/ready")).body:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            refused = await second.client.post(COMPLETIONS, STREAM)
            assert refused.status == 503
            assert "follower of" in refused.json["error"]["message"]
            assert (await first.client.post(COMPLETIONS, STREAM)).done
            await scenario(first, second)

    play(main())


@pytest.mark.parametrize("how", usually([signal.SIGKILL], [signal.SIGKILL, signal.SIGTERM]))
def test_the_other_one_serves_when_the_leader_ends(tmp_path: Path, how: signal.Signals) -> None:
    async def scenario(first: Served, second: Served) -> None:
        stream = first.client.send(b"POST", COMPLETIONS, STREAM | {"max_tokens": 600})
        await stream.until_events(3)
        first.process.send_signal(how)
        await ready(second)
        assert (await second.client.post(COMPLETIONS, STREAM)).done
        await stream.end()
        assert stream.done == (how == signal.SIGTERM)
        await first.exit()

    run_two(tmp_path, scenario)


def test_an_update_keeps_the_lead(tmp_path: Path) -> None:
    async def scenario(first: Served, second: Served) -> None:
        over = asyncio.Event()

        async def keep_asking() -> None:
            client = Client(first.ports()[0])
            while not over.is_set():
                answer = await client.post(COMPLETIONS, STREAM | {"max_tokens": 5})
                assert answer.done, (answer.status, answer.body, answer.error)
                await asyncio.sleep(0.02)
            client.close()

        stream = first.client.send(b"POST", COMPLETIONS, STREAM | {"max_tokens": 600})
        await stream.until_events(3)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(keep_asking())
            child = await begin(first)
            assert (await stream.end()).done
            await until_waiting(first.process.pid)
            assert children(first.process.pid) == [child]
            # Longer than a term.
            await asyncio.sleep(2.0)
            over.set()
        assert (await second.client.get("/ready")).status == 503
        first.process.send_signal(signal.SIGTERM)
        await ready(second)
        await first.exit()

    run_two(tmp_path, scenario)
