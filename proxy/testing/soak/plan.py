"""What happens in a soak: a chaos run's plan, with what can be done to real processes.

Its time is no clock's. It goes on with the load, so that a slow machine has the same faults at the same
requests.
"""

import random
from dataclasses import replace

from balanceroute.proxy.lab.emulate.faults import AfterPull, MalformedStream
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.testing.chaos.audit import SLOWING
from balanceroute.proxy.testing.chaos.clients import Phase, Visit
from balanceroute.proxy.testing.chaos.faults import Act, Injection, draw_injections
from balanceroute.proxy.testing.chaos.plan import MODEL, Plan, Weather, draw_visits
from balanceroute.proxy.testing.chaos.requests import RequestMix
from balanceroute.proxy.testing.chaos.world import WorldSettings

S_PER_REQUEST = 0.06
LEAVING = 0.2
_MIX = RequestMix(MODEL, max_tokens=120, big=0.02, big_bytes=(50_000, 150_000), odd=0.02)
_REQUESTS_PER_FAULT = 8
# In this first part of a load faults begin, so that the last engine is back soon after it.
_FAULTY = 0.85
_ACTS = frozenset({Act.BOARD, Act.KILL, Act.DRAIN})


def draw_plan(seed: int, numbers: range, world: WorldSettings, *, calm: bool) -> Plan:
    """Return a plan."""
    rng = random.Random(f"soak {seed} {numbers.start}")
    span_s = len(numbers) * S_PER_REQUEST
    visits = draw_visits(rng, numbers, span_s, _MIX, leaving=0.0 if calm else LEAVING)
    injections = draw_injections(
        rng,
        count=0 if calm else len(numbers) // _REQUESTS_PER_FAULT,
        prefillers=world.engines.prefillers,
        decoders=world.engines.ranks,
        connector=world.engines.connector,
        policies=("",),  # Nobody switches them here.
        span_s=_FAULTY * span_s,
    )
    return Plan(
        seed,
        Weather.CALM if calm else Weather.FAULTS,
        world,
        tuple(_with_real_wires(visit) for visit in visits),
        tuple(one for one in injections if _is_possible(one, world.engines.prefillers - 1)),
        storm_s=None,
        calm_s=span_s,
        shutdown_s=None,
    )


def _with_real_wires(visit: Visit) -> Visit:
    """Return a visit without what only a wire in memory and a look into the proxy allow."""
    departure = visit.departure
    if departure is not None and departure.phase is Phase.QUEUED:
        departure = replace(departure, phase=Phase.SENDING)
    elif departure is not None and departure.phase not in (Phase.STREAMING, Phase.LAST_WORD):
        departure = replace(departure, phase=Phase.AFTER)
    return replace(visit, departure=departure, pauses=(), link=None)


def _is_possible(injection: Injection, control: int) -> bool:
    """Return whether a fault can be had here.

    Not if it makes an engine late for a KV cache, which no proxy can see (`chaos.audit`), or costs as
    much memory as a leak. And the prefiller `control` takes the orders to all engines.
    """
    changes = injection.changes
    if injection.act not in _ACTS or changes.get("malformed") is MalformedStream.HUGE:
        return False
    if changes.keys() & SLOWING - {"hang"}:
        return False
    out_of_reach = injection.act is Act.KILL or "refuse" in changes
    return not (out_of_reach and (injection.role, injection.engine) == (Role.PREFILL, control))


def is_deadly(injection: Injection) -> bool:
    """Return whether engines die of a fault."""
    return injection.act is Act.KILL or injection.changes.get("after_pull") is AfterPull.DEATH
