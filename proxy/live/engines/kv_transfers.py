"""Who is at fault when KV caches cannot be pulled: the prefiller, or the rank.

The rank reports it, whichever is at fault: with a 5xx, an error event, or silence. So failures are
kept by both sides, until a pull of that side succeeds. A prefiller that fails with several ranks is
itself at fault, and so is a rank that fails with several prefillers. Where the failures are all of
one pair, the side that gets on with others is not at fault. And it takes several requests: one that
no engine can answer says nothing of the engines.

A prefiller at fault is quarantined, and comes back on trial: with one request at a time until one
pull succeeds. What it fails then is mended outside of the retry budget, and it waits longer before
the next trial.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Target

    # Who pulls from whom at present.
    Pairs = Iterable[tuple[Prefiller, Rank]]

# Failures kept of each side: more of one that cannot be judged tell nothing more.
_KEPT = 32


class KvTransfers:
    """Judges prefillers and ranks by the pulls between them.

    Args:
        enough: Requests that fail in a row before anyone is at fault.
        pulling: Tells who pulls from whom at present.
        convict: Quarantines one that is at fault, and returns whether it did: its role may have
            no other instance. `again` says that it was on trial.
        is_on_trial: Tells whether an instance has just come back, and served nothing since.
        count: Called with the names of both sides and the reason of every failure.
        passed: Called when a prefiller's trial is over.
    """

    def __init__(
        self,
        enough: int,
        *,
        pulling: "Callable[[], Pairs]",
        convict: "Callable[[Target, str, bool], bool]",
        is_on_trial: "Callable[[Target], bool]",
        count: Callable[[str, str, str], None],
        passed: Callable[[], None],
    ) -> None:
        self._enough = enough
        self._pulling = pulling
        self._convict = convict
        self._is_on_trial = is_on_trial
        self._count = count
        self._passed = passed
        # By instance: the requests that failed since its last success, and with whom, in order.
        self._failures: dict[Target, dict[tuple[RequestId, Target], None]] = {}

    def succeeded(self, prefiller: "Prefiller", rank: "Rank") -> None:
        """Note that a rank has pulled a KV cache."""
        if self._failures:
            self._failures.pop(prefiller.target, None)
            self._failures.pop(rank.target, None)
        if prefiller.kv_trial:
            prefiller.kv_trial = False
            self._passed()

    def failed(
        self,
        request: "RequestId",
        prefiller: "Prefiller",
        rank: "Rank",
        fault: "Fault",
        reason: str,
    ) -> None:
        """Note that a rank failed to pull a KV cache, and quarantine who is at fault, if known."""
        self._count(prefiller.name, rank.name, fault.value)
        self._note(prefiller.target, request, rank.target)
        self._note(rank.target, request, prefiller.target)
        reason = f"KV caches cannot be pulled: {reason}"
        if prefiller.kv_trial or self._outweighs(prefiller.target, rank.target):
            again, prefiller.kv_trial = prefiller.kv_trial, True
            if not self._convict(prefiller.target, reason, again):
                prefiller.kv_trial = again
            self._failures.pop(rank.target, None)
            return
        on_trial = self._is_on_trial(rank.target)
        if on_trial or self._outweighs(rank.target, prefiller.target):
            self._convict(rank.target, reason, on_trial)
            self._failures.pop(prefiller.target, None)

    def _note(self, target: "Target", request: "RequestId", other: "Target") -> None:
        failures = self._failures.setdefault(target, {})
        failures[request, other] = None
        if len(failures) > _KEPT:
            del failures[next(iter(failures))]

    def _outweighs(self, one: "Target", other: "Target") -> bool:
        """Return whether an instance is at fault rather than the other of its pair."""
        weight, others_weight = self._weight(one), self._weight(other)
        if weight[1] < self._enough:
            return False
        if weight == others_weight:
            return self._gets_on(other, other_than=one)
        return weight > others_weight

    def _weight(self, target: "Target") -> tuple[int, int]:
        """Return with how many others an instance failed, and how many requests."""
        failures = self._failures[target]
        return len({other for _, other in failures}), len({request for request, _ in failures})

    def _gets_on(self, target: "Target", *, other_than: "Target") -> bool:
        """Return whether pulls between an instance and others go on, though none has ended yet."""
        return any(
            target in (prefiller.target, rank.target)
            and other_than not in (prefiller.target, rank.target)
            for prefiller, rank in self._pulling()
        )
