"""The tasks and timers that there are when little happens, and whose they are."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.testing.chaos.world import World

_SAMPLES = 20
_CENSUSES = 20
# No part of the intervals of the proxy: what wakes up in the moment of a sample has no timer.
_GAP_S = 0.0517


@dataclass(frozen=True, slots=True)
class Census:
    """How many there are of each kind."""

    tasks: Counter[str]
    timers: Counter[str]

    def beyond(self, before: "Census") -> list[str]:
        """Return what is more than before."""
        found = []
        for name in ("tasks", "timers"):
            was, there_are = getattr(before, name), getattr(self, name)
            if there_are.total() > was.total():
                more = ", ".join(f"{one} x {count}" for one, count in (there_are - was).items())
                found.append(
                    f"leak: {there_are.total()} {name}, there were {was.total()} before the first "
                    f"request; more of: {more}"
                )
        return found


async def take_census(world: "World") -> Census:
    """Count tasks and timers a few times; the least counts, for the proxy probes its engines."""
    tasks: list[Counter[str]] = []
    timers: list[Counter[str]] = []
    for _ in range(_SAMPLES):
        await asyncio.sleep(_GAP_S)
        tasks.append(Counter(map(_of_task, world.loop.pending_tasks())))
        timers.append(Counter(map(_of_timer, world.loop.timers)))
    return Census(min(tasks, key=Counter.total), min(timers, key=Counter.total))


async def audit_census(world: "World", before: Census) -> list[str]:
    """Return of what there is more than before.

    A probe that was under way before makes that count too low, so it is counted again until one is.
    """
    found: list[str] = []
    for _ in range(_CENSUSES):
        found = (await take_census(world)).beyond(before)
        if not found:
            break
    return found


def _of_task(task: "asyncio.Task[object]") -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def _of_timer(handle: asyncio.TimerHandle) -> str:
    """Return what a timer calls; of one that wakes a task, the task's coroutine."""
    callback: object = getattr(handle, "_callback", None)
    waits = [task for task in asyncio.all_tasks() if _is_woken_by(task, handle)]
    if waits:
        return _of_task(waits[0])
    while isinstance(callback, partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", callback))


def _is_woken_by(task: "asyncio.Task[object]", handle: asyncio.TimerHandle) -> bool:
    # A sleep sets its future's result; a time-out belongs to its task.
    woken = getattr(task, "_fut_waiter", None)
    owner = getattr(getattr(handle, "_callback", None), "__self__", None)
    woken_by = getattr(handle, "_args", None) or ()
    return any(one is woken for one in woken_by) or getattr(owner, "_task", None) is task
