"""Bodies that are being read: large ones give way to each other and to everything else."""

import asyncio
from dataclasses import dataclass, field

from balanceroute.proxy.live.frontend.body_queue import BodyQueue
from balanceroute.proxy.live.openai.body import BodyError, RequestBody

SMALL = b'{"prompt": "a"}'


def large(elements: int) -> bytes:
    return b'{"prompt": [' + b"[]," * elements + b"1]}"


@dataclass
class Reader:
    """Who waits for a body."""

    closed: bool = False
    results: list[RequestBody | BodyError] = field(default_factory=list)

    def take(self, result: RequestBody | BodyError) -> None:
        self.results.append(result)


async def rounds() -> None:
    for _ in range(1_000):
        await asyncio.sleep(0)


def test_a_small_body_is_read_at_once() -> None:
    good, bad = Reader(), Reader()
    queue = BodyQueue()
    queue.read(SMALL, good, good.take)
    queue.read(b"[]", bad, bad.take)
    assert isinstance(good.results[0], RequestBody)
    assert isinstance(bad.results[0], BodyError)


def test_large_bodies_are_read_in_turn_and_in_many_rounds_of_the_loop() -> None:
    async def scenario() -> None:
        queue = BodyQueue()
        first, second, broken = Reader(), Reader(), Reader()
        queue.read(large(90_000), first, first.take)
        queue.read(large(50_000), second, second.take)
        queue.read(large(60_000)[:-1], broken, broken.take)
        rounds = 0
        order: list[Reader] = []
        while len(order) < 3:
            await asyncio.sleep(0)
            rounds += 1
            order += [r for r in (first, second, broken) if r.results and r not in order]
        # The first to come is not the first to end: the others are shorter.
        assert order == [second, broken, first]
        assert rounds > 60
        assert isinstance(first.results[0], RequestBody)
        assert isinstance(broken.results[0], BodyError)

    asyncio.run(scenario())


def test_a_body_that_nobody_waits_for_is_read_no_further() -> None:
    async def scenario() -> None:
        queue = BodyQueue()
        gone, there = Reader(), Reader()
        queue.read(large(90_000), gone, gone.take)
        queue.read(large(50_000), there, there.take)
        gone.closed = True
        await rounds()
        assert gone.results == []
        assert len(there.results) == 1
        # And it begins again after it was empty.
        queue.read(large(50_000), there, there.take)
        await rounds()
        assert len(there.results) == 2

    asyncio.run(scenario())
