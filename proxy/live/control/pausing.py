"""Pause, resume and abort all, as training frameworks ask for it around an update of the weights.

The names and the modes are those of an engine, vLLM 0.32, which has the routes with
VLLM_SERVER_DEV_MODE=1. Here an order is about all engines, and about requests that are on none: those
that wait before their prefill, and those whose KV cache waits for a rank.

* Paused, no prefill starts. A new request waits in the queue, with its limits.
* `wait` lets requests end that have begun their prefill, and then pauses the engines.
* `abort` ends at once requests on no engine, with an error, and has the engines abort the rest: these
  answers end with the finish reason `abort` and their text so far. One that an engine does not end in
  time, as it does not answer or has no such route, ends with an error, and the connection to it with
  that, for which engines abort a request too. So every answer ends, and once.
* `keep` is refused: a stream that stands still, and a KV cache under a lease, have time limits.
* What else is done around an update, such as the update itself, goes to all engines as it came: `fan_out`.
* `sleep` is the same as pause, and then has engines give their memory back; `wake_up` ends it as soon as
  no engine sleeps any more, as `tags` may wake up a part of it.

Paused it stays, also for a process that takes over, and for groups that are added meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.live.control.orders import ConflictError
from balanceroute.proxy.live.control.roster import Roster, note_sleep
from balanceroute.proxy.live.engines.engine_url import Fetcher, FetchError
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.openai.body import is_deep
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.scheduling.driver import Driver

MODES = ("abort", "wait")
LEVELS = (0, 1, 2)
_KEEP = (
    "mode=keep is not served: streams that stand still, and KV caches under a lease, would run into their "
    "time limits; use abort or wait"
)
ABORTED = "aborted by an administrator"
# How long engines take to end what they abort, beyond their answer to the order.
_GRACE_S = 2.0
_STEP_S = 0.05
_PAGE_BYTES = 4096
# Of an engine's answer to what it gets as it came.
_ANSWER_BYTES = 1 << 16
# Weights are copied to and from the host's memory.
_MEMORY_S = 120.0
_ON_NO_ENGINE = frozenset({LifecycleState.QUEUED, LifecycleState.POOLED})


class OrderedGroup(Protocol):
    """The engines of one model, and what decides about them."""

    driver: Driver
    roster: Roster
    fetcher: Fetcher

    def ordered(self) -> None:
        """Keep the orders in the store."""


class Pausing:
    """Carries out the orders."""

    def __init__(self, groups: Callable[[], Iterable[OrderedGroup]]) -> None:
        self._groups = groups

    @property
    def paused(self) -> bool:
        return all(group.driver.scheduler.intake.held for group in self._groups())

    async def pause(
        self, mode: str, *, clear_cache: bool, engines: bool, limit_s: float
    ) -> dict[str, object]:
        """Start nothing from now on; then end running requests, or wait for their end.

        Args:
            mode: One of `MODES`.
            clear_cache: Passed on to the engines.
            engines: Whether the engines are asked to pause, too.
            limit_s: How long to wait for running requests.

        Returns:
            The status, how many requests were aborted, and what each engine answered.

        Raises:
            ConfigError: There is no such mode.
            ConflictError: Requests run still after the limit. Nothing starts nevertheless.
        """
        _check(mode)
        query = urlencode({"mode": mode, "clear_cache": str(clear_cache).lower()})
        path = f"/pause?{query}" if engines else ""
        return {"status": "paused", **await self._stop(mode, path, limit_s)}

    async def sleep(self, level: int, mode: str, *, limit_s: float) -> dict[str, object]:
        """Do as `pause` does, and have the engines sleep.

        `level` is 0 to pause alone, 1 to give up KV caches and offload weights, 2 to give up both.

        Raises:
            ConfigError: There is no such level or mode.
            ConflictError: Requests run still after the limit. Nothing starts nevertheless.
        """
        _check(mode)
        if level not in LEVELS:
            raise ConfigError(f"level is {level}, must be 0, 1 or 2")
        path = f"/sleep?{urlencode({'level': level, 'mode': mode})}"
        done = await self._stop(mode, path, limit_s, timeout_s=_MEMORY_S)
        return {"status": "sleeping", "level": level, **done}

    async def wake_up(self, tags: list[str]) -> dict[str, object]:
        """Have the engines wake up, or what of their memory `tags` name; go on if none sleeps then."""
        query = f"?{urlencode([('tags', tag) for tag in tags])}" if tags else ""
        asked = await self._ask(f"/wake_up{query}", timeout_s=_MEMORY_S)
        targets = [(group, target) for group in self._groups() for target in group.roster.targets()]
        asleep = await asyncio.gather(*(_sleeps(group.fetcher, one.url) for group, one in targets))
        for (group, target), sleeps in zip(targets, asleep, strict=True):
            if note_sleep(group.roster.instances, target, asleep=sleeps):
                group.roster.reopen()
        if not any(asleep):
            self._hold(held=False)
        status = "sleeping" if self.paused else "awake"
        return {"status": status, "asleep": sum(asleep), "engines": asked}

    async def resume(self, *, engines: bool) -> dict[str, object]:
        """Let the engines and the proxy go on; return what each engine answered."""
        asked = await self._ask("/resume" if engines else "")
        self._hold(held=False)
        return {"status": "resumed", "engines": asked}

    async def abort(self, request_ids: list[str] | None) -> dict[str, object]:
        """End the requests that there are, or those with some ids; later ones are served."""
        if not request_ids:
            return {"status": "aborted", **await self._abort("/abort_requests")}
        ids = frozenset(request_ids)
        chosen = [
            (group.driver, number)
            for group in self._groups()
            for number, one in group.driver.sessions.items()
            if one.record.request_id in ids
        ]
        for driver, number in chosen:
            _end(driver, number)
        return {"status": "aborted", "aborted": len(chosen), "engines": []}

    async def fan_out(self, path: str, body: bytes, *, limit_s: float) -> dict[str, object]:
        """Post something to every engine at the same time, which may take `limit_s`.

        Returns:
            Whether each engine did it, and what each answered: `answer` is None if that is no JSON of at
            most 64 KiB.

        Raises:
            ConflictError: There are no engines.
        """
        rows = await self._ask(path, timeout_s=limit_s, body=body)
        if not rows:
            raise ConflictError("there are no engines")
        for row in rows:
            row["answer"] = _read(row.pop("body", b""))
        # vLLM answers 200 with false if a cache is in use.
        success = all(one["status"] == 200 and _succeeded(one["answer"]) for one in rows)
        return {"status": "sent", "success": success, "engines": rows}

    def _hold(self, *, held: bool) -> None:
        for group in self._groups():
            group.driver.hold(held=held)
            group.ordered()

    async def _stop(
        self, mode: str, path: str, limit_s: float, *, timeout_s: float | None = None
    ) -> dict[str, object]:
        """Start nothing from now on, end running requests or wait for them, and post an order to engines."""
        self._hold(held=True)
        if mode == "abort":
            return await self._abort(path or "/abort_requests", timeout_s=timeout_s)
        await self._until_none_runs(limit_s)
        return {"aborted": 0, "engines": await self._ask(path, timeout_s=timeout_s)}

    async def _abort(self, path: str, *, timeout_s: float | None = None) -> dict[str, object]:
        """End every request that there is now; `path` is what engines are asked for."""
        asked: list[tuple[Driver, RequestId, Session]] = [
            (group.driver, number, one)
            for group in self._groups()
            for number, one in group.driver.sessions.items()
        ]
        for driver, number, one in asked:
            request = driver.scheduler.requests.get(number)
            if request is None or request.state in _ON_NO_ENGINE:
                _end(driver, number)
            else:
                one.abort_ordered = True
        # Relays have to know before engines answer: what an engine aborts by itself is done elsewhere.
        await asyncio.sleep(_STEP_S)
        answers = await self._ask(path, timeout_s=timeout_s)
        clock = asyncio.get_running_loop().time
        end_s = clock() + _GRACE_S
        while True:
            await asyncio.sleep(_STEP_S)
            if clock() >= end_s or not any(_lives(*one) for one in asked):
                break
        for driver, number, one in asked:
            if _lives(driver, number, one):
                _end(driver, number)
        return {"aborted": len(asked), "engines": answers}

    async def _until_none_runs(self, limit_s: float) -> None:
        clock = asyncio.get_running_loop().time
        end_s = clock() + limit_s
        while running := sum(
            request.state is not LifecycleState.QUEUED
            for group in self._groups()
            for request in group.driver.scheduler.requests.values()
        ):
            if clock() >= end_s:
                raise ConflictError(f"{running} requests run still; nothing new starts")
            await asyncio.sleep(_STEP_S)

    async def _ask(
        self, path: str, *, timeout_s: float | None = None, body: bytes | None = None
    ) -> list[dict[str, Any]]:
        """Post an order to every engine at the same time; return what each answered.

        Its `body` is among that if the order has one.
        """
        if not path:
            return []
        asked = [
            (group.fetcher, target) for group in self._groups() for target in group.roster.targets()
        ]
        posts = (_post(*one, path, timeout_s, body) for one in asked)
        return list(await asyncio.gather(*posts))


async def _post(
    fetcher: Fetcher,
    target: Target,
    path: str,
    timeout_s: float | None,
    body: bytes | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {"url": target.url, "role": target.role.value}
    most = _PAGE_BYTES if body is None else _ANSWER_BYTES
    try:
        answer = await fetcher.order(
            target.url + path, b"{}" if body is None else body, max_bytes=most, timeout_s=timeout_s
        )
    except FetchError as error:
        return row | {"status": None, "error": str(error)}
    return row | {"status": answer.status} | ({} if body is None else {"body": answer.body})


def _read(body: bytes) -> object:
    """Return the value of an engine's JSON; None if it is invalid, or could not be written again."""
    try:
        said: object = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return None if is_deep(said) else said


def _succeeded(said: object) -> bool:
    return not isinstance(said, dict) or said.get("success") is not False


async def _sleeps(fetcher: Fetcher, url: str) -> bool:
    """Return whether an engine says that it sleeps; one that does not know how to is awake."""
    try:
        said = _read(await fetcher.body(f"{url}/is_sleeping", max_bytes=_PAGE_BYTES))
    except FetchError:
        return False
    return isinstance(said, dict) and said.get("is_sleeping") is True


def _check(mode: str) -> None:
    """Raise ConfigError unless requests can be dealt with so."""
    if mode == "keep":
        raise ConfigError(_KEEP)
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}, must be one of {', '.join(MODES)}")


def _lives(driver: Driver, number: RequestId, one: Session) -> bool:
    return driver.sessions.get(number) is one


def _end(driver: Driver, number: RequestId) -> None:
    session = driver.sessions.get(number)
    if session is not None:
        driver.isolation.run_for(session, "abort", session.give_up, ABORTED)
