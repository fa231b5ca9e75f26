"""The virtual loop by itself: time, order, deadlocks, errors, and what it refuses to do."""

import asyncio
import gc
import math
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import tests.support.virtual.loop as loop_module
from tests.support.played import in_virtual_time
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import (
    VirtualDeadlock,
    VirtualLivelock,
    VirtualLoop,
    VirtualTimeError,
    VirtualTimeLimit,
)
from tests.support.virtual.recorder import Recorder
from tests.support.virtual.runner import UncleanRunError, run

DAY_S = 86_400.0


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_day_of_sleep_is_over_at_once() -> None:
    async def main(loop: VirtualLoop) -> float:
        assert asyncio.get_running_loop() is loop
        began = loop.time()
        await asyncio.sleep(DAY_S)
        return loop.time() - began

    assert run(main, seed=0) == DAY_S


def test_the_clock_starts_where_told_and_not_at_zero() -> None:
    async def main(loop: VirtualLoop) -> float:
        return loop.time()

    assert run(main, seed=0) == 1000.0
    assert run(main, seed=0, start_s=5.0) == 5.0


def test_the_clock_stands_still_while_a_callback_is_ready() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        times: list[float] = []
        loop.call_later(1e-9, times.append, -1.0)
        for _ in range(100):
            await asyncio.sleep(0)
            times.append(loop.time())
        return [*times]

    assert run(main, seed=0) == [1000.0] * 100


def test_timers_run_by_time_and_then_in_the_order_of_their_setting() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        order: list[str] = []
        loop.call_later(2.0, order.append, "c")
        loop.call_later(1.0, order.append, "a")
        loop.call_at(loop.time() + 1.0, order.append, "b")
        loop.call_at(loop.time() + 2.0, order.append, "d")
        loop.call_at(loop.time() - 5.0, order.append, "past")
        loop.call_soon(order.append, "soon")
        await asyncio.sleep(3.0)
        return order

    assert run(main, seed=0) == ["soon", "past", "a", "b", "c", "d"]


def test_a_timer_of_the_past_does_not_turn_back_the_clock() -> None:
    async def main(loop: VirtualLoop) -> float:
        ran: list[float] = []
        await asyncio.sleep(10.0)
        loop.call_at(3.0, lambda: ran.append(loop.time()))
        await asyncio.sleep(0.0)  # Something is ready all the time; the timer has its turn.
        await asyncio.sleep(0.0)
        (when,) = ran
        return when

    assert run(main, seed=0) == 1010.0


def test_cancelled_timers_neither_run_nor_hold_the_clock_back() -> None:
    async def main(loop: VirtualLoop) -> tuple[list[int], float, int]:
        ran: list[int] = []
        timers = [loop.call_later(1.0 + number, ran.append, number) for number in range(1000)]
        for number, timer in enumerate(timers):
            if number != 500:
                timer.cancel()
                timer.cancel()
        assert loop.pending_timers == 1
        await asyncio.sleep(600.0)
        return ran, loop.time(), loop.pending_timers

    assert run(main, seed=0) == ([500], 1600.0, 0)


def test_cancelled_timers_are_forgotten_long_before_their_time() -> None:
    async def main(loop: VirtualLoop) -> int:
        timers = [loop.call_later(1e5, print) for _ in range(1000)]
        kept = [weakref.ref(timer) for timer in timers]
        for timer in timers[100:]:
            timer.cancel()
        del timer, timers
        await asyncio.sleep(1.0)
        return sum(timer() is not None for timer in kept)

    assert run(main, seed=0) == 100


@in_virtual_time(seed=0)
async def test_a_timer_at_nan_is_refused(loop: VirtualLoop) -> None:
    with pytest.raises(ValueError, match="NaN"):
        loop.call_later(math.nan, lambda: None)


def test_asyncio_primitives_work() -> None:
    async def main(loop: VirtualLoop) -> list[object]:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        event = asyncio.Event()

        async def produce() -> None:
            for number in range(3):
                await asyncio.sleep(1.0)
                await queue.put(number)
            event.set()

        async def consume() -> list[int]:
            return [await queue.get() for _ in range(3)]

        _, got = await asyncio.gather(produce(), consume())
        await event.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await forever()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forever(), timeout=5.0)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(1.0, "slept"))
        return [got, task.result(), loop.time()]

    assert run(main, seed=0) == [[0, 1, 2], "slept", 1014.0]


def test_an_asynchronous_generator_left_open_is_closed_at_the_end() -> None:
    closed: list[float] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0.25)
            closed.append(asyncio.get_running_loop().time())

    kept = []

    async def main(_: VirtualLoop) -> None:
        dropped = numbers()
        assert await anext(dropped) == 1
        del dropped
        await asyncio.sleep(0.5)
        kept.append(numbers())
        assert await anext(kept[0]) == 1

    run(main, seed=0)
    assert closed == [1000.25, 1000.75]


def test_a_deadlock_names_the_pending_tasks_and_where_they_wait() -> None:
    async def main(_: VirtualLoop) -> None:
        stuck = asyncio.create_task(forever(), name="stuck")
        await stuck

    with pytest.raises(VirtualDeadlock) as caught:
        run(main, seed=42)
    message = str(caught.value)
    assert "task-1" in message
    assert f"stuck: forever at {__file__}:{forever.__code__.co_firstlineno + 1}" in message
    assert caught.value.__notes__ == ["seed 42, virtual time 1000.0"]


def test_a_deadlock_behind_a_periodic_timer_meets_the_time_limit() -> None:
    async def main(loop: VirtualLoop) -> None:
        def tick() -> None:
            loop.call_later(1.0, tick)

        tick()
        await forever()

    with pytest.raises(VirtualTimeLimit, match="forever"):
        run(main, seed=0, limit_s=100.0)


def test_callbacks_that_stop_the_clock_are_a_livelock() -> None:
    loop = VirtualLoop(callbacks_per_instant=1000)

    async def main() -> None:
        await asyncio.sleep(0)
        loop.create_task(main())

    loop.create_task(main())
    with pytest.raises(VirtualLivelock, match="main"):
        loop.run_forever()
    for task in loop.pending_tasks():
        task.cancel()
    loop.call_later(1.0, loop.stop)
    loop.run_forever()
    loop.close()


def test_a_run_until_stopped_ends() -> None:
    loop = VirtualLoop()
    loop.call_later(3.0, loop.stop)
    loop.call_later(4.0, loop.stop)
    loop.run_forever()
    assert loop.time() == 1003.0
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1.0, print)
    assert loop.pending_timers == 0


def test_errors_in_callbacks_are_recorded_with_their_time() -> None:
    async def main(loop: VirtualLoop) -> None:
        loop.call_later(2.0, lambda: 1 // 0)
        await asyncio.sleep(5.0)
        (error,) = loop.errors
        assert error.time_s == 1002.0
        assert isinstance(error.exception, ZeroDivisionError)
        assert "lambda" in error.message

    run(main, seed=0, check=False)
    with pytest.raises(UncleanRunError, match=r"at 1002\.0: .*ZeroDivisionError") as caught:
        run(main, seed=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_that_nobody_retrieves_makes_a_run_unclean() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def main(_: VirtualLoop) -> None:
        cycle: list[object] = [asyncio.create_task(fail())]
        cycle.append(cycle)
        await asyncio.sleep(1.0)

    with pytest.raises(UncleanRunError, match="never retrieved"):
        run(main, seed=0)


def test_tasks_that_are_left_are_cancelled() -> None:
    ended: list[str] = []

    async def linger(name: str) -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0.1)
            ended.append(name)

    kept: list[asyncio.Task[None]] = []

    async def main(_: VirtualLoop) -> None:
        kept.extend(asyncio.create_task(linger(name)) for name in "abc")
        await asyncio.sleep(1.0)

    run(main, seed=0)
    assert ended == ["a", "b", "c"]


def test_a_task_that_ignores_its_cancellation_is_named() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > 1050.0:
                    raise

    kept: list[asyncio.Task[None]] = []

    async def main(_: VirtualLoop) -> None:
        kept.append(asyncio.create_task(stubborn(), name="mule"))
        await asyncio.sleep(1.0)

    with pytest.raises(VirtualTimeError, match="mule"):
        run(main, seed=0)


def test_what_is_left_open_makes_a_run_unclean() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_server(Recorder, "127.0.0.1", 8000)
        await loop.create_connection(Recorder, "127.0.0.1", 8000)

    with pytest.raises(UncleanRunError) as caught:
        run(main, seed=9)
    message = str(caught.value)
    assert message.startswith("the run of seed 9 left")
    assert message.count("open: <MemoryTransport #1") == 2
    assert "listening: 127.0.0.1:8000" in message


def test_an_error_of_the_run_is_not_hidden_by_what_it_left() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_server(Recorder, "127.0.0.1", 8000)
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)
        raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason") as caught:
        run(main, seed=3)
    assert "seed 3" in caught.value.__notes__[0]
    assert "ZeroDivisionError" in caught.value.__notes__[1]


def test_tasks_are_numbered_by_their_loop_alone() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        tasks = [loop.create_task(asyncio.sleep(1.0)) for _ in range(12)]
        named = loop.create_task(asyncio.sleep(1.0), name="own")
        names = [task.get_name() for task in loop.pending_tasks()]
        await asyncio.gather(*tasks, named)
        return names

    expected = [f"task-{number}" for number in range(1, 14)] + ["own"]
    assert run(main, seed=0) == expected
    assert run(main, seed=0) == expected


def test_pending_tasks_are_listed_in_the_order_of_their_creation() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        tasks = [loop.create_task(asyncio.sleep(1.0 + number % 7)) for number in range(100)]
        await asyncio.sleep(6.5)
        names = [task.get_name() for task in loop.pending_tasks()]
        await asyncio.gather(*tasks)
        return names

    assert run(main, seed=0) == ["task-1"] + [f"task-{2 + number}" for number in range(6, 100, 7)]


def test_sets_of_tasks_have_a_reproducible_order() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        tasks = [loop.create_task(asyncio.sleep(1.0)) for _ in range(200)]
        order = [task.get_name() for task in set(tasks)]
        await asyncio.gather(*tasks)
        return order

    assert run(main, seed=0) == run(main, seed=0)


def test_literal_addresses_resolve_and_names_do_not() -> None:
    async def main(loop: VirtualLoop) -> list[Any]:
        with pytest.raises(socket.gaierror, match="no names"):
            await loop.getaddrinfo("engine.example", 80)
        with pytest.raises(socket.gaierror, match="family"):
            await loop.getaddrinfo("::1", 80, family=socket.AF_INET)
        return [
            (await loop.getaddrinfo(host, 80))[0][4]
            for host in ("10.1.2.3", "localhost", b"127.0.0.1", "::1", None)
        ]

    found = run(main, seed=0)
    assert found[:3] == [("10.1.2.3", 80), ("127.0.0.1", 80), ("127.0.0.1", 80)]
    assert found[3:] == [("::1", 80, 0, 0), ("0.0.0.0", 80)]  # noqa: S104


@pytest.mark.parametrize(
    "call",
    [
        lambda loop: loop.call_soon_threadsafe(print),
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.add_signal_handler(2, print),
        lambda loop: loop.sock_connect(None, ("127.0.0.1", 1)),
        lambda loop: loop.subprocess_exec(print, "true"),
    ],
)
def test_what_needs_a_real_machine_is_refused(call: Callable[[Any], object]) -> None:
    loop = VirtualLoop()
    with pytest.raises(NotImplementedError, match=r"VirtualLoop\.\w+: "):
        call(loop)
    loop.close()


@in_virtual_time(seed=0)
async def test_tls_and_real_sockets_are_refused(loop: Any) -> None:
    with pytest.raises(NotImplementedError, match="TLS"):
        await loop.create_connection(Recorder, "127.0.0.1", 1, ssl=True)
    with pytest.raises(NotImplementedError, match="TLS"):
        await loop.create_server(Recorder, "127.0.0.1", 1, ssl=True)
    with pytest.raises(NotImplementedError, match="sockets"):
        await loop.create_connection(Recorder, sock=object())
    listener = await loop.create_server(Recorder, "127.0.0.1", 1)
    with pytest.raises(NotImplementedError, match=r"asyncio\.Protocol"):
        await loop.create_connection(asyncio.BufferedProtocol, "127.0.0.1", 1)
    listener.close()


def test_a_loop_without_a_network_says_so() -> None:
    loop = VirtualLoop()
    with pytest.raises(RuntimeError, match="no network"):
        loop.run_until_complete(loop.create_server(Recorder, "127.0.0.1", 0))
    loop.close()


def test_debug_mode_can_be_switched_from_within() -> None:
    async def main(loop: VirtualLoop) -> bool:
        loop.set_debug(True)
        loop.slow_callback_duration = 0.0
        await asyncio.sleep(1.0)
        loop.set_debug(False)
        return loop.get_debug()

    assert run(main, seed=0, link=Link()) is False


class Cell:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_at_a_count_of_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "CALLBACKS_PER_COLLECTION", 50)

    async def main(loop: VirtualLoop) -> int:
        cell = weakref.ref(Cell())
        alive = []
        for _ in range(100):
            await asyncio.sleep(1.0)
            alive.append(cell() is not None)
        assert not gc.isenabled()
        return sum(alive)

    assert 20 < run(main, seed=0) < 30  # A sleep takes two callbacks.
    assert gc.isenabled()


def test_a_hundred_thousand_callbacks_and_timers_take_no_time() -> None:
    async def main(loop: VirtualLoop) -> tuple[int, float]:
        done = loop.create_future()
        left = 100_000

        def tick() -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set_result(None)
            elif left % 2:
                loop.call_later(1.0, tick)
            else:
                loop.call_soon(tick)

        loop.call_soon(tick)
        await done
        return loop.callbacks_run, loop.time()

    callbacks, now = run(main, seed=0)
    assert callbacks < 100_010
    assert now == 1000.0 + 50_000.0
