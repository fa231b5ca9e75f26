"""Orders of administrators in a run: which ones, when, and what ends them; all drawn from the seed."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.support.chaos.faults import Act, Injection

from balanceroute.proxy.live.engines.instances import Role

_SHARE = 0.6
# How often an order is about an engine that is at fault just then.
_AT_FAULT = 0.4
ADMIN = {"admin": True, "admin_port": 0}
"""Flags of a proxy that takes orders."""


class OrderKind(Enum):
    """What is ordered; what was stopped or sent away is ordered back later."""

    PAUSE = "pauses and aborts"
    PAUSE_WAIT = "pauses and waits"
    SLEEP = "has engines sleep"
    SLEEP_WAIT = "waits and has engines sleep"
    ABORT = "aborts all"
    ABORT_SOME = "aborts some"
    DRAIN = "drains an engine"
    DRAIN_WAIT = "drains an engine and waits"
    DRAIN_DEADLINE = "drains an engine with a deadline"
    REMOVE = "removes an idle engine"
    REMOVE_BUSY = "removes an engine with all that it does"
    WORKER = "removes a worker"
    ADD_AGAIN = "adds an engine that is there"
    OTHER_ROLE = "adds an engine as another role"
    CONTRADICT = "contradicts itself about an engine"
    CONTRADICT_PAUSE = "contradicts itself about a pause"
    LOOK = "looks at the pages"
    NONSENSE = "orders what cannot be"


ABORTING = frozenset(
    {OrderKind.PAUSE, OrderKind.SLEEP, OrderKind.ABORT, OrderKind.CONTRADICT_PAUSE}
)
"""After which answers may end with the finish reason of an aborted request."""
OF_ENGINES = frozenset(
    {
        OrderKind.DRAIN,
        OrderKind.DRAIN_WAIT,
        OrderKind.DRAIN_DEADLINE,
        OrderKind.REMOVE,
        OrderKind.REMOVE_BUSY,
        OrderKind.WORKER,
        OrderKind.ADD_AGAIN,
        OrderKind.OTHER_ROLE,
        OrderKind.CONTRADICT,
    }
)
"""Those that are about one engine."""


@dataclass(frozen=True, slots=True)
class Order:
    """One order."""

    kind: OrderKind
    role: Role  # Of the engine that it is about, if it is about one.
    engine: int
    start_s: float  # When it is given, from the beginning of the run.
    end_s: float  # When it is taken back.
    seed: int  # Decides about what is left to draw when it is given.

    @property
    def name(self) -> str:
        """What a summary calls it."""
        return f"admin: {self.kind.value}"


def draw_orders(
    seed: int,
    *,
    engines: tuple[int, int],
    faults: Sequence[Injection],
    span_s: float,
    of_all: bool = False,
) -> list[Order]:
    """Return the orders of a seed, in the order of their beginnings; often none.

    Args:
        seed: Decides.
        engines: How many prefillers and decode engines there are.
        faults: What goes wrong.
        span_s: All begin within this time.
        of_all: Whether none is drawn that is about one engine.
    """
    rng = random.Random(f"orders {seed}")
    if rng.random() >= _SHARE:
        return []
    dying = [one for one in faults if one.act in (Act.KILL, Act.SILENCE, Act.PROCESS)]
    orders = []
    for _ in range(rng.choice([1, 2, 4, 8])):
        kind = rng.choice([one for one in OrderKind if not (of_all and one in OF_ENGINES)])
        role = rng.choice(list(Role))
        engine = 0 if of_all else rng.randrange(engines[role is Role.DECODE])
        start_s = rng.uniform(0.0, span_s)
        if dying and rng.random() < _AT_FAULT:
            fault = rng.choice(dying)
            role, engine = fault.role, fault.engine
            start_s = fault.start_s + rng.choice([-0.001, 0.0, 0.001, 0.1, 0.5])
        end_s = start_s + rng.choice([0.1, 0.5, 2.0]) * rng.uniform(0.5, 1.5)
        start_s = max(start_s, 0.0)
        orders.append(Order(kind, role, engine, start_s, end_s, rng.getrandbits(32)))
    return sorted(orders, key=lambda one: (one.start_s, one.end_s))


def ordered_drains(faults: Iterable[Injection]) -> list[Order]:
    """Return drains among the faults as orders: a part with orders has to know of every one."""
    return [
        Order(OrderKind.DRAIN, one.role, one.engine, one.start_s, one.end_s, 0)
        for one in faults
        if one.act is Act.DRAIN
    ]
