"""`s1-enhanced`, `s2-enhanced`, `s2-dynamic-waiting`: prefillers drawn by a score of their metrics.

As TBLB does: a member is drawn with the probability of its score's share; one that scores 0 is not;
without any, the one with the fewest requests is taken. One of which nothing was scraped yet scores
0.001. Different from TBLB, and off by default: limits that exclude a member before it is scored, and a
limit to its share of the requests between two scrapes. Always different: what was sent to a member
since its scrape counts as waiting there, and what ended since no longer.

Source: https://github.com/f5devcentral/llm-inference-lb, core/scheduler.py at f254c3e.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

from msgspec import structs

from balanceroute.proxy.core.events import (
    Action,
    EngineLoad,
    Event,
    PrefillDone,
    PrefillerId,
    PrefillerScraped,
    PrefillLost,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    StartPrefill,
)
from balanceroute.proxy.core.prefill.base import (
    PrefillInputs,
    PrefillRequest,
    PrefillView,
    Turns,
)
from balanceroute.proxy.core.prefill.least_conn import under_way
from balanceroute.proxy.core.prefill.tblb_scores import Scores

_UNKNOWN_SCORE = 0.001
_ENDS = (PrefillDone, PrefillLost, RequestFinished, RequestFailed, RequestCancelled)


class Scored:
    """A candidate drawn by its score.

    Args:
        scores: The score of each member.
        inputs: Their generator and limits.
    """

    def __init__(self, scores: Scores, inputs: PrefillInputs) -> None:
        self.observer = self._observe
        self._scores = scores
        self._rng = inputs.rng
        self._limits = inputs.limits
        self._turns = Turns()
        self._scraped: dict[PrefillerId, EngineLoad] = {}
        # Since the last scrape of each: requests begun less those ended, and requests given.
        self._since: defaultdict[PrefillerId, int] = defaultdict(int)
        self._given: defaultdict[PrefillerId, int] = defaultdict(int)
        self._places: dict[RequestId, PrefillerId] = {}

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return a candidate drawn by the scores, or that with the fewest requests."""
        del request
        scores = self._scored([one for one in candidates if self._within_limits(one)])
        if len(scores) == 1:
            (chosen,) = scores
        elif scores:
            (chosen,) = self._rng.choices(list(scores), list(scores.values()))
        else:
            chosen = self._turns.least(candidates, lambda one: under_way(view, one))
        self._given[chosen] += 1
        return chosen

    def _scored(self, members: Sequence[PrefillerId]) -> dict[PrefillerId, float]:
        """Return the members with positive scores."""
        known = [one for one in members if one in self._scraped]
        scores = dict.fromkeys(members, _UNKNOWN_SCORE)
        if known:
            scores |= zip(known, self._scores([self._load(one) for one in known]), strict=True)
        return {one: score for one, score in scores.items() if score > 0.0}

    def _load(self, prefiller: PrefillerId) -> EngineLoad:
        load = self._scraped[prefiller]
        waiting = load.waiting + self._since[prefiller]
        running = max(0.0, load.running + min(0.0, waiting))
        return structs.replace(load, waiting=max(0.0, waiting), running=running)

    def _within_limits(self, prefiller: PrefillerId) -> bool:
        limits = self._limits
        if limits.share is not None:
            most = ceil(limits.share * (sum(self._given.values()) + 1))
            if self._given[prefiller] >= max(1, most):
                return False
        if prefiller not in self._scraped:
            return True
        load = self._load(prefiller)
        return (limits.waiting is None or load.waiting <= limits.waiting) and (
            limits.running is None or load.running <= limits.running
        )

    def _observe(self, event: Event, actions: Sequence[Action], _now_ns: int) -> None:
        if isinstance(event, PrefillerScraped):
            self._scraped[event.prefiller] = event.load
            self._since[event.prefiller] = self._given[event.prefiller] = 0
        elif isinstance(event, _ENDS):
            place = self._places.pop(event.request, None)
            if place is not None:
                self._since[place] -= 1
        for action in actions:
            if isinstance(action, StartPrefill):
                self._places[action.request] = action.prefiller
                self._since[action.prefiller] += 1
