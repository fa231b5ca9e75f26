"""Run a coroutine on a virtual loop with a network, and leave nothing behind."""

import asyncio
import gc
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import LIMIT_S, START_S, VirtualLoop, VirtualTimeError
from tests.support.virtual.network import Network

T = TypeVar("T")

SETTLE_S = 1.0


class UncleanRunError(AssertionError):
    """A run ended well but left errors, connections or listeners behind; the message lists them."""


def run(
    main: Callable[[VirtualLoop], Coroutine[Any, Any, T]],
    *,
    seed: int,
    link: Link | None = None,
    abort_resets: bool = True,
    journal: bool = False,
    start_s: float = START_S,
    limit_s: float = LIMIT_S,
    settle_s: float = SETTLE_S,
    check: bool = True,
) -> T:
    """Run `main(loop)` to its end, in virtual time, on a network seeded by `seed`.

    Afterwards tasks that are left are cancelled, and the network has `settle_s` to close what is
    closing. What `main` raises carries a note with the seed and the virtual time.

    Args:
        main: Given the loop; loop.network is its network.
        seed: Of the network's generator.
        link: Of every connection that no rule covers.
        abort_resets: See Network.
        journal: Whether loop.network.traffic.journal is kept.
        start_s: See VirtualLoop.
        limit_s: See VirtualLoop; virtual seconds.
        settle_s: Virtual seconds.
        check: Whether an unclean end raises.

    Returns:
        What `main` returned.

    Raises:
        UncleanRunError: `main` returned, but the loop has errors, or connections or listeners are
            open.
        VirtualDeadlock: `main` waits for what cannot come.
        VirtualLivelock: Time stands still.
        VirtualTimeLimit: `main` takes longer than `limit_s`.
    """
    with _reproducible_collection():
        loop = VirtualLoop(start_s=start_s, limit_s=limit_s)
        network = Network(
            loop, random.Random(seed), link=link, abort_resets=abort_resets, journal=journal
        )
        loop.attach(network)
        try:
            try:
                value = loop.run_until_complete(main(loop))
            except BaseException as error:
                error.add_note(f"seed {seed}, virtual time {loop.time()!r}")
                for fault in _errors(loop):
                    error.add_note(f"unhandled {fault}")
                raise
            finally:
                _settle(loop, settle_s)
            if check:
                _check(loop, network, seed)
        finally:
            loop.close()
    return value


def _settle(loop: VirtualLoop, settle_s: float) -> None:
    """Cancel what is left and let closing connections close."""
    left = loop.pending_tasks()
    for task in left:
        task.cancel()
    loop.extend_limit(settle_s)
    if left:
        loop.run_until_complete(_ended(left, settle_s))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(asyncio.sleep(settle_s))
    gc.collect()  # Unretrieved exceptions are reported when their future goes.


async def _ended(tasks: list[asyncio.Task[Any]], timeout_s: float) -> None:
    ended, stuck = await asyncio.wait(tasks, timeout=timeout_s)
    for task in ended:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            task.get_loop().call_exception_handler(
                {"message": "a task failed when cancelled", "exception": error, "task": task}
            )
    if stuck:
        names = ", ".join(sorted(task.get_name() for task in stuck))
        raise VirtualTimeError(f"tasks that do not end when cancelled: {names}")


def _errors(loop: VirtualLoop) -> list[str]:
    return [f"at {error.time_s!r}: {error.message}: {error.exception!r}" for error in loop.errors]


def _check(loop: VirtualLoop, network: Network, seed: int) -> None:
    faults = _errors(loop)
    faults += [
        f"open: {end!r}"
        for connection in network.connections()
        for end in (connection.client, connection.server)
        if not end.is_shut
    ]
    faults += [f"listening: {host}:{port}" for host, port in network.listeners]
    if faults:
        cause = next((error.exception for error in loop.errors if error.exception), None)
        raise UncleanRunError(f"the run of seed {seed} left\n  " + "\n  ".join(faults)) from cause


@contextmanager
def _reproducible_collection() -> Iterator[None]:
    """Keep the garbage collector from running at moments that depend on the process's past.

    It finalizes tasks and asynchronous generators, which the loop then sees. The loop collects at
    counts of callbacks instead. What existed before the run stays out of every later collection:
    among 10,000 tests one look at all of it takes longer than most runs.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.collect()  # The world of the run before has cycles.
    gc.freeze()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
