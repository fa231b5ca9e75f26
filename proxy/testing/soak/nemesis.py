"""What goes wrong with the engines while a load runs."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from balanceroute.proxy.testing.soak.control import Control
from balanceroute.proxy.testing.soak.load import Load

# What every engine does wrong all the time, each with this probability for a leg.
ALWAYS: Mapping[str, object] = {
    "status_500": 0.01,
    "status_503": 0.005,
    "status_429": 0.005,
    "reset_before_headers": 0.01,
    "eos_first": 0.005,
    "drop_kv_params": 0.01,
    "alien_kv_params": 0.005,
}
# What one engine does wrong for a while, one after the other.
SPELLS: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("decode/0", {"reset_after_tokens": 0}),
    ("decode/1", {"reset_after_tokens": 3}),
    ("decode/2", {"stall_after_tokens": 2}),
    ("decode/3", {"error_event_after_tokens": 4}),
    ("prefill/0", {"malformed_answer": "not_json"}),
    ("decode/0", {"end_after_tokens": 5}),
    ("decode/3", {"after_pull": "reset"}),
    ("decode/0", {"after_pull": "error", "after_pull_s": 0.5}),
    ("decode/1", {"stall_after_tokens": 0}),
    ("decode/2", {"error_event_after_tokens": 0}),
    ("prefill/0", {"malformed_answer": "truncated"}),
    ("prefill/1", {"hang": True}),
    ("decode/3", {"hang": True}),
    ("decode/0", {"refuse": True}),
)
# So much of the load is sent meanwhile.
SPELL = 0.008
# Of vllm-ascend's ranks alone.
RECOMPUTING: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("decode/1", {"recomputed_after_tokens": 4}),
    ("decode/2", {"recomputed_after_tokens": 0}),
)
# Killed after the first share of the load, started again after the second.
DEATHS = (("decode/3", 0.42, 0.5), ("prefill/0", 0.56, 0.64))
# After this share of the load the proxy stands still for longer than leases last.
STANDSTILL = 0.8
_FIRST, _LAST = 0.02, 0.92


async def torment(
    engines: Control,
    load: Load,
    *,
    recomputing: bool,
    stand_still: Callable[[], Awaitable[None]],
) -> None:
    """Let everything fail while a load runs, then take all faults back.

    Args:
        engines: An engine that does not die.
        load: Tells how far it is.
        recomputing: Whether ranks may hand requests back.
        stand_still: Suspends the proxy for a while.
    """
    spells = SPELLS + RECOMPUTING if recomputing else SPELLS
    for share, order, values in _orders(spells):
        await load.reached(share)
        if order is None:
            await stand_still()
        else:
            await engines.post(f"/emulation/{order}", values)
    await load.reached(1.0)
    await engines.post("/emulation/faults/clear", {})


def _orders(
    spells: Sequence[tuple[str, Mapping[str, object]]],
) -> list[tuple[float, str | None, Mapping[str, object]]]:
    """Return what to tell the engines, and after which share of the load; None is the standstill."""
    orders: list[tuple[float, str | None, Mapping[str, object]]] = [
        (0.0, "faults", ALWAYS),
        (STANDSTILL, None, {}),
    ]
    for number, (engine, faults) in enumerate(spells):
        begin = _FIRST + (_LAST - _FIRST) * number / len(spells)
        orders += [
            (begin, "faults", {"engine": engine, **faults}),
            (begin + SPELL, "faults/clear", {"engine": engine}),
            (begin + SPELL, "faults", {"engine": engine, **ALWAYS}),
        ]
    for engine, begin, end in DEATHS:
        orders.append((begin, "kill", {"engine": engine}))
        orders.append((end, "restore", {"engine": engine}))
    return sorted(orders, key=lambda order: order[0])
