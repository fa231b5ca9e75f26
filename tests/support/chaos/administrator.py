"""Gives the orders of a plan over the admin listener; see `promises` for what their answers promise.

Every order is answered, with one of the statuses that fit what was ordered before.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tests.support.chaos.orders import OF_ENGINES, Order, OrderKind
from tests.support.chaos.promises import (
    Aborted,
    Promises,
    Said,
    other_role,
)
from tests.support.chaos.world import Part, SchedulerStep, World

from balanceroute.proxy.lab.emulate.engine import Engine
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.wire.messages import Response, WireError

_LOOK_S = 0.1
_TRIES = 60
_AGAIN_S = 0.5
_PAGES = (
    *("/", "/health", "/metrics", "/is_paused", "/workers"),
    *("/admin/state?requests=1", "/admin/instances", "/admin/requests?id=req-0"),
)
_NOWHERE = "http://127.0.0.1:1"
_NONSENSE: tuple[tuple[str, str, object, int], ...] = (
    ("POST", "/admin/instances", {"role": "router", "url": _NOWHERE}, 400),
    ("POST", "/admin/instances", {"role": "decode", "url": _NOWHERE}, 400),
    ("POST", "/admin/instances/drain", {"role": "decode", "url": _NOWHERE}, 404),
    ("POST", "/admin/instances/remove", {"role": "prefill"}, 400),
    ("POST", "/admin/policy", {"policy": "the best"}, 400),
    ("POST", "/admin/log-level", {"level": "all"}, 400),
    ("POST", "/pause?mode=keep", {}, 400),
    ("POST", "/sleep?level=9", {}, 400),
    ("POST", "/abort_requests", {"request_ids": "all"}, 400),
    ("DELETE", "/workers/0", None, 404),
    ("GET", "/resume", None, 405),
)
# Of the orders about an engine: the statuses that answer them, by what was said of it before.
_Fits = Mapping[Said, frozenset[int]]
_DONE, _NONE, _THERE = frozenset({200}), frozenset({404}), frozenset({409})
# Its ranks are asked for, and it does not answer.
_SILENT = frozenset({400})
_CLOSES: _Fits = {
    Said.PRESENT: _DONE,
    Said.DRAINED: _DONE,
    Said.LEAVING: _DONE | _NONE,
    Said.REMOVED: _NONE,
}
_ADDS: _Fits = {
    Said.PRESENT: _THERE,
    Said.DRAINED: _DONE,
    Said.LEAVING: _DONE | _SILENT,
    Said.REMOVED: _DONE | _SILENT,
}


class Administrator:
    """Works on one part of a world.

    Args:
        world: Where the proxy is.
        part: Whose engines the orders are about.
        orders: What to do.
        clean: Whether what is sent to an engine arrives at once.
    """

    def __init__(self, world: World, part: Part, orders: Sequence[Order], *, clean: bool) -> None:
        self.done: Counter[str] = Counter()  # How many orders of each kind there were.
        self.promises = Promises(world, part, clean)  # What was answered, and what must not be.
        # Set when the proxy begins to stop: orders may get no answer from then on.
        self.closing = False
        self._world, self._part, self._orders = world, part, orders
        self._tasks: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None

    def begin(self, at_s: float) -> None:
        """Give all orders as planned; the plan's time 0 is `at_s` of the loop."""
        if self._orders:
            for target in self._engines():
                self.promises.of(target).said = Said.PRESENT
            loop = self._world.loop
            self._tasks = [loop.create_task(self._carry_out(one, at_s)) for one in self._orders]
            self._looking = loop.create_task(self._look())

    async def stop(self) -> None:
        """Wait for the answers, and take everything back."""
        await asyncio.gather(*self._tasks)
        if self._looking is not None:
            if not self.closing:
                await self._take_all_back()
                await asyncio.sleep(self._world.lag_s)
            self._looking.cancel()

    def saw(self, step: SchedulerStep) -> None:
        """Hold the scheduler to the answered orders."""
        if self._orders and step.group == self._part.name and self._part.is_there:
            self.promises.saw(step)

    def _engines(self) -> set[Target]:
        """Return the engines that no other administrator orders; engines of groups have their own."""
        if not any(one.kind in OF_ENGINES for one in self._orders):
            return set()
        return {self._target(one) for one in self._part.fleet.engines}

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._part.is_there and not self.closing:
                self.promises.look()

    # Orders as planned.

    async def _carry_out(self, order: Order, at_s: float) -> None:
        journal, rng = self._world.journal, random.Random(order.seed)
        target = self._target(self._part.fleet.engine(f"{order.role.value}/{order.engine}"))
        for when_s, do in ((order.start_s, self._give), (order.end_s, self._take_back)):
            await asyncio.sleep(max(0.0, at_s + when_s - self._world.loop.time()))
            if self._part.is_there and not self.closing:
                journal.write("order", order.name, do.__name__, target.role.value, order.engine)
                await do(order.kind, target, rng)
        self.done[order.name] += 1

    async def _give(self, kind: OrderKind, target: Target, rng: random.Random) -> None:
        limit_s = rng.choice([0, 0.5, 3])
        orders: dict[OrderKind, Callable[[], Awaitable[None]]] = {
            OrderKind.PAUSE: partial(self._stop_all, "/pause?mode=abort"),
            OrderKind.PAUSE_WAIT: partial(self._stop_all, f"/pause?mode=wait&timeout_s={limit_s}"),
            OrderKind.SLEEP: partial(self._stop_all, f"/sleep?level={rng.randint(0, 2)}"),
            OrderKind.SLEEP_WAIT: partial(self._stop_all, f"/sleep?mode=wait&timeout_s={limit_s}"),
            OrderKind.ABORT: self._abort,
            OrderKind.ABORT_SOME: partial(self._abort_some, rng),
            OrderKind.DRAIN: partial(self._drain, target),
            OrderKind.DRAIN_WAIT: partial(self._drain, target, wait_s=rng.choice([0.2, 1.0, 10.0])),
            OrderKind.DRAIN_DEADLINE: partial(self._drain, target, deadline_s=limit_s / 10),
            OrderKind.REMOVE: partial(self._remove, target, force=False),
            OrderKind.REMOVE_BUSY: partial(self._remove, target, force=True),
            OrderKind.WORKER: partial(self._remove_worker, target),
            OrderKind.ADD_AGAIN: partial(self._add, target),
            OrderKind.OTHER_ROLE: partial(self._add, other_role(target)),
            OrderKind.CONTRADICT: partial(self._contradict, target, rng),
            OrderKind.CONTRADICT_PAUSE: partial(self._contradict_pause, rng),
            OrderKind.LOOK: self._look_at_pages,
            OrderKind.NONSENSE: partial(self._say_nonsense, rng),
        }
        await orders[kind]()

    async def _take_back(self, kind: OrderKind, target: Target, rng: random.Random) -> None:
        if kind in (OrderKind.PAUSE, OrderKind.PAUSE_WAIT):
            await self._begin_all("/resume")
        elif kind in (OrderKind.SLEEP, OrderKind.SLEEP_WAIT, OrderKind.CONTRADICT_PAUSE):
            if rng.random() < 0.5:
                await self._begin_all("/wake_up?tags=weights")
            await self._begin_all("/wake_up")
            await self._begin_all("/resume")
        elif kind is OrderKind.OTHER_ROLE:
            await self._remove(other_role(target), force=True)
        elif kind is OrderKind.WORKER:
            await self._add_worker(target)
        elif kind in OF_ENGINES and kind is not OrderKind.ADD_AGAIN:
            await self._add(target)

    async def _abort_some(self, rng: random.Random) -> None:
        ids = [one.record.request_id for one in self._sessions().values()]
        if ids:  # No ids stand for all.
            await self._abort(rng.sample(ids, min(len(ids), rng.randint(1, 3))))

    async def _contradict_pause(self, rng: random.Random) -> None:
        stops = [partial(self._stop_all, path) for path in ("/pause", "/sleep")]
        begins = [partial(self._begin_all, path) for path in ("/resume", "/wake_up")]
        await _at_once(rng.sample([*stops, *begins, self._abort], rng.randint(2, 4)))

    async def _look_at_pages(self) -> None:
        for path in _PAGES:
            await self._say("GET", path, None, _DONE)
        await self._say("GET", "/ready", None, frozenset({200, 503}))

    async def _say_nonsense(self, rng: random.Random) -> None:
        for method, path, order, status in rng.sample(_NONSENSE, 4):
            await self._say(method, path, order, frozenset({status}))

    async def _contradict(self, target: Target, rng: random.Random) -> None:
        await self._learn(target)  # Not between the two.
        deadline_s = rng.choice([0.0, 0.3])
        orders = [
            partial(self._drain, target),
            partial(self._drain, target, deadline_s=deadline_s),
            partial(self._remove, target, force=True),
            partial(self._remove_worker, target),
            partial(self._add, target),
            partial(self._add, target),
        ]
        await _at_once(rng.sample(orders, 2))

    async def _take_all_back(self) -> None:
        """Have all engines there and awake, as they were before."""
        engines = self._engines()
        for _ in range(_TRIES):
            await self._begin_all("/wake_up")
            await self._begin_all("/resume")
            for target in list(self.promises.engines):
                await self._learn(target)
                said = self.promises.of(target).said
                if target not in engines and said is not Said.REMOVED:
                    await self._remove(target, force=True)
                elif target in engines and said is not Said.PRESENT:
                    await self._add(target)
            about = self.promises.engines.items()
            there = {one for one, orders in about if orders.said is Said.PRESENT}
            if there == engines and self.promises.of_all.paused is False:
                return
            await asyncio.sleep(_AGAIN_S)
        self.promises.broken("what was ordered cannot be taken back")

    # Orders about all.

    def _sessions(self) -> dict[int, Any]:
        return {int(n): one for n, one in self._part.deployment.driver.sessions.items()}

    def _must_go(self, sessions: Mapping[int, object], driver: object) -> None:
        at_s = self._world.loop.time() + self._world.lag_s
        self.promises.aborted.append(Aborted(at_s, driver, sessions))

    async def _stop_all(self, path: str) -> None:
        aborts, orders = "mode=wait" not in path, self.promises.of_all
        driver, sessions, begun = self._part.deployment.driver, self._sessions(), orders.begin()
        orders.paused = orders.stopped_s = None
        fits = frozenset({200, 502} if aborts else {200, 409, 502})
        answer = await self._say("POST", path, {}, fits)
        if not orders.end(begun) or answer is None:
            return
        orders.paused = True
        if answer.status != 409:
            orders.stopped_s = self._world.loop.time()
        if aborts:
            self._must_go(sessions, driver)

    async def _begin_all(self, path: str) -> None:
        orders = self.promises.of_all
        begun = orders.begin()
        orders.paused = orders.stopped_s = None
        answer = await self._say("POST", path, {}, frozenset({200, 502}))
        if orders.end(begun) and answer is not None:
            orders.paused = json.loads(answer.body)["status"] == "sleeping"

    async def _abort(self, ids: Sequence[str] | None = None) -> None:
        driver, sessions = self._part.deployment.driver, self._sessions()
        if ids is not None:
            sessions = {n: one for n, one in sessions.items() if one.record.request_id in ids}
        order = {} if ids is None else {"request_ids": ids}
        answer = await self._say("POST", "/abort_requests", order, frozenset({200, 502}))
        if answer is not None:
            self._must_go(sessions, driver)

    # Orders about one engine.

    def _target(self, engine: Engine) -> Target:
        role = Role(engine.name.partition("/")[0])
        return Target(role, self._world.known(engine.url))

    async def _drain(self, target: Target, **more: float) -> None:
        late = frozenset({504} if "wait_s" in more else ())
        fits = {said: one | late if 200 in one else one for said, one in _CLOSES.items()}
        await self._order(target, "/drain", more, fits, Said.DRAINED)

    async def _remove(self, target: Target, *, force: bool) -> None:
        busy = frozenset() if force else _THERE
        fits = {said: one | busy if 200 in one else one for said, one in _CLOSES.items()}
        await self._order(target, "/remove", {"force": force}, fits, Said.REMOVED)

    async def _add(self, target: Target) -> None:
        await self._order(target, "", self._more(target), _ADDS, Said.PRESENT)

    def _more(self, target: Target) -> dict[str, object]:
        """Return what a prefiller has beside its address."""
        engines = self._part.fleet.engines
        engine = next(one for one in engines if self._world.known(one.url) == target.url)
        has_one = target.role is Role.PREFILL and engine.bootstrap_url
        return {"bootstrap": engine.bootstrap_url} if has_one else {}

    async def _remove_worker(self, target: Target) -> None:
        listed = await self._say("GET", "/workers", None, _DONE)
        if listed is not None:
            workers = json.loads(listed.body)["workers"]
            ids = [w["id"] for w in workers if (w["worker_type"], w["url"]) == _key(target)]
            for worker in ids:
                await self._order(target, f"/workers/{worker}", None, _CLOSES, Said.LEAVING)

    async def _add_worker(self, target: Target) -> None:
        order: dict[str, object] = {"url": target.url, "worker_type": target.role.value}
        if (bootstrap := self._more(target).get("bootstrap")) is not None:
            order["bootstrap_port"] = int(str(bootstrap).rpartition(":")[2])
        await self._order(target, "/workers", order, _ADDS, Said.PRESENT)

    async def _order(
        self, target: Target, path: str, order: Mapping[str, object] | None, fits: _Fits, then: Said
    ) -> None:
        """Give an order about an engine, and note what it makes of it."""
        await self._learn(target)
        orders = self.promises.of(target)
        begun, before, orders.said = orders.begin(), orders.said, None
        method = "POST" if order is not None else "DELETE"
        if not path.startswith("/workers"):
            path = f"/admin/instances{path}"
            order = {"role": target.role.value, "url": target.url, **(order or {})}
        answer = await self._say(method, path, order, None)
        if not orders.end(begun) or answer is None:
            return
        status = 200 if answer.status == 202 else answer.status
        if before is not None and status not in fits[before]:
            words = f"{method} {path} {order}: {status} though it was {before.value}"
            self.promises.broken(words)
        elif status in (200, 504):
            orders.said = then
            orders.sessions = self.promises.on(target)
        else:
            orders.said = before

    async def _learn(self, target: Target) -> None:
        """Ask what is of an engine if that is not known."""
        orders = self.promises.of(target)
        if orders.said is not None or orders.open:
            return
        answer = await self._say("GET", "/admin/instances", None, _DONE)
        if answer is not None and not orders.open:
            rows = json.loads(answer.body)["instances"]
            statuses = [row["status"] for row in rows if (row["role"], row["url"]) == _key(target)]
            orders.said = Said.REMOVED
            if statuses:
                orders.said = Said.LEAVING if statuses[0] == "draining" else Said.PRESENT

    async def _say(
        self, method: str, path: str, order: object, fits: frozenset[int] | None
    ) -> Response | None:
        """Give an order; return its answer, None if no proxy was there to answer.

        `fits` are the statuses that it may have; None for whatever the caller makes of it.
        """
        world = self._world
        try:
            answer = await world.ask(method, path, order)
        except (WireError, OSError) as error:
            if not self.closing:
                self.promises.broken(f"{method} {path} got no answer: {error}")
            return None
        world.journal.write("answer", method, path, answer.status)
        if answer.status >= 500 and answer.status not in (502, 503, 504):
            self.promises.broken(f"{method} {path} {order}: {answer.status}")
        if fits is not None and answer.status not in fits:
            self.promises.broken(f"{method} {path} {order}: {answer.status}, {answer.body!r}")
        return answer


async def _at_once(orders: Sequence[Callable[[], Awaitable[None]]]) -> None:
    await asyncio.gather(*(order() for order in orders))


def _key(target: Target) -> tuple[str, str]:
    return target.role.value, target.url
