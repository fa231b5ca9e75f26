"""Which requests a kill of a process met, and where they were then."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.testing.chaos.answer_reader import Ending, Received

PHASES = ("queued", "prefilling", "pooled", "before the first token", "streaming")


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Attributes:
        at_s: When, on the clients' clock.
        relay: Whether a relay was killed; else the scheduler process.
        phases: The phases of all requests that were live, by their ids; None if no process could tell.
    """

    at_s: float
    relay: bool
    phases: Mapping[str, str] | None


def phases_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the phases of live requests by their ids, as /admin/state?requests=1 tells them."""
    return {one["request_id"]: _phase_of(one) for one in state["requests"]}


def hits_of(kills: Sequence[Kill], answers: Iterable[tuple[str, Received]]) -> Counter[str]:
    """Return how many requests were hit in each phase.

    The scheduler process has to do with every live request. A relay has to do with those whose
    connections broke between its end and the next kill.
    """
    broken: dict[str, float] = {}
    for request_id, received in answers:
        if received.ending is not Ending.COMPLETE:
            broken[request_id] = received.ended_s
    hits: Counter[str] = Counter()
    for i, kill in enumerate(kills):
        next_s = kills[i + 1].at_s if i + 1 < len(kills) else float("inf")
        for request_id, phase in (kill.phases or {}).items():
            if not kill.relay or kill.at_s <= broken.get(request_id, -1.0) < next_s:
                hits[phase] += 1
    return hits


def _phase_of(request: Mapping[str, Any]) -> str:
    if request["state"] != "decoding":
        return str(request["state"])
    return PHASES[4] if request["emitted_tokens"] else PHASES[3]
