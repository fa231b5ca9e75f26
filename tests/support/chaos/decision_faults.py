"""A policy and a predictor that fail, or answer what cannot be obeyed, in some rounds.

Every fault is counted when it is made, with what the proxy must say of it: so its metric and its log
can be held against that.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.errors import PolicyError, PredictorError
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.ranks import Assignment, Fleet, Policy
from balanceroute.proxy.core.waiting import Pool
from balanceroute.proxy.live.telemetry import component_metrics

if TYPE_CHECKING:
    import logging

    from numpy.typing import NDArray

    from balanceroute.predictors import Predictor, RequestFeatures
    from balanceroute.proxy.core.ranks import Follower

_NO_REQUEST = RequestId(-1)
_NOT_TAKEN = "request {!r} was not taken from the pool, or is there twice"
_NO_SLOT = "rank {!r} is closed or has no slot for request {}"
_UNABLE = "rank {} cannot serve request {}"


class DecisionFault(Enum):
    """What a policy or a predictor does wrong."""

    RAISES = "policy raises"
    RAISES_LATE = "policy raises with requests taken"
    CLOSED_RANK = "policy names a closed rank"
    NO_SUCH_RANK = "policy names no rank"
    NO_SUCH_REQUEST = "policy names no request"
    TWICE = "policy admits a request twice"
    TOO_MANY = "policy exceeds the slots"
    WITHOUT_RANK = "policy keeps a request"
    PREDICTOR_RAISES = "predictor raises"
    PREDICTOR_NAN = "predictor answers with NaN"


class InjectedError(Exception):
    """Raised by what is made to fail."""


@dataclass(frozen=True, slots=True)
class Lapse:
    """A time in which decisions fail."""

    fault: DecisionFault  # What goes wrong.
    share: float  # Of the rounds, or of the calls of the predictor, in 0..1.
    seed: int  # Decides which ones.


def draw_lapse(rng: random.Random) -> Lapse:
    fault, share = rng.choice(list(DecisionFault)), rng.choice([0.1, 0.5, 1.0])
    return Lapse(fault, share, rng.getrandbits(32))


class DecisionFaults:
    """Says when a fault is due, and keeps account of those made."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()  # How many the proxy must have counted, by what failed.
        self._lapses: dict[Lapse, random.Random] = {}
        self._texts: set[str] = set()

    def begin(self, lapse: Lapse) -> None:
        self._lapses[lapse] = random.Random(lapse.seed)

    def end(self, lapse: Lapse) -> None:
        self._lapses.pop(lapse, None)

    def clear(self) -> None:
        self._lapses.clear()

    def due(self, *, predictor: bool) -> DecisionFault | None:
        """Return what goes wrong in this round of the policy, or in this call of the predictor."""
        for lapse, rng in self._lapses.items():
            is_predictor = lapse.fault.value.startswith("predictor")
            if is_predictor is predictor and rng.random() < lapse.share:
                return lapse.fault
        return None

    def failure(self, what: str) -> InjectedError:
        """Count a failure and return what to raise."""
        self.made[what] += 1
        return InjectedError(what)

    def nonsense(self, what: str, *texts: str) -> None:
        """Count an answer that must be refused with one of some texts."""
        self.made[what] += 1
        self._texts.update(texts)

    def explains(self, record: "logging.LogRecord") -> bool:
        """Return whether a log record is of a fault that was made here."""
        error = record.exc_info[1] if record.exc_info else None
        what = getattr(record, "fields", {}).get("what")
        return (
            record.name == component_metrics.__name__
            and what in self.made
            and (
                (isinstance(error, InjectedError) and error.args == (what,))
                or (isinstance(error, PolicyError | PredictorError) and str(error) in self._texts)
            )
        )


class FaultyPolicy:
    """Another policy, whose answers are spoilt when a fault is due."""

    def __init__(self, inner: Policy, faults: DecisionFaults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def slots_beyond_batch(self) -> int | None:
        return self._inner.slots_beyond_batch

    @property
    def projection(self) -> "Follower | None":
        return self._inner.projection

    @property
    def next_decision_ns(self) -> int | None:
        return self._inner.next_decision_ns

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Answer well or not."""
        fault = self._faults.due(predictor=False)
        if fault is DecisionFault.RAISES:
            raise self._faults.failure("policy")
        # A policy may write to its fleet.
        free_slots, is_open = fleet.free_slots.copy(), fleet.is_open.copy()
        good = self._inner.dispatch(fleet, pool, now_ns)
        if fault is None:
            return good
        if fault is DecisionFault.RAISES_LATE:
            raise self._faults.failure("policy")
        spoilt = _spoil(fault, good, is_open, free_slots, pool)
        if spoilt is None:  # There is nothing now to do wrong in this way.
            return good
        answer, text = spoilt
        # Some ranks fit no prefiller that has the request's KV cache.
        unable = (_UNABLE.format(one.rank, one.request) for one in answer)
        self._faults.nonsense("policy", text, *unable)
        return answer


def _spoil(
    fault: DecisionFault,
    good: list[Assignment],
    is_open: "NDArray[np.bool_]",
    free_slots: "NDArray[np.int64]",
    pool: Pool,
) -> tuple[list[Assignment], str] | None:
    """Return a wrong answer and what must be said of it; None if there is none of this kind."""
    if fault is DecisionFault.NO_SUCH_REQUEST:
        return [*good, Assignment(_NO_REQUEST, RankId(0))], _NOT_TAKEN.format(_NO_REQUEST)
    if fault is DecisionFault.TOO_MANY:
        return _too_many(good, is_open, free_slots, pool)
    if not good:
        return None
    first, rest = good[0].request, good[1:]
    if fault is DecisionFault.TWICE:
        return [*good, good[0]], _NOT_TAKEN.format(first)
    if fault is DecisionFault.WITHOUT_RANK:
        return rest, f"request {first} was taken from the pool, but has no rank"
    if fault is DecisionFault.NO_SUCH_RANK:
        rank = RankId(len(is_open))
        return [Assignment(first, rank), *rest], f"rank {rank!r} is unknown: there are {rank}"
    assert fault is DecisionFault.CLOSED_RANK, fault
    if is_open.all():
        return None
    rank = RankId(int(is_open.argmin()))
    return [Assignment(first, rank), *rest], _NO_SLOT.format(rank, first)


def _too_many(
    good: list[Assignment],
    is_open: "NDArray[np.bool_]",
    free_slots: "NDArray[np.int64]",
    pool: Pool,
) -> tuple[list[Assignment], str] | None:
    """Return an answer that sends one rank more than it has slots for."""
    if not is_open.any():
        return None
    rank = RankId(int(np.where(is_open, free_slots, free_slots.max() + 1).argmin()))
    left = int(free_slots[rank])
    taken = pool.taken
    answer = []
    for entry in [*(taken[one.request] for one in good), *pool]:
        answer.append(Assignment(entry.request, rank))
        if left < 1:
            for number, _ in answer:
                if number in pool:
                    pool.admit(number)
            return answer, _NO_SLOT.format(rank, entry.request)
        left -= entry.slots
    return None


class FaultyPredictor:
    """Another predictor, which fails when a fault is due; it learns from each report all the same."""

    def __init__(self, inner: "Predictor", faults: DecisionFaults) -> None:
        self._inner = inner
        self._faults = faults

    def begin(self, request: RequestId, features: "RequestFeatures") -> None:
        self._inner.begin(request, features)
        self._fail_if_due()

    def observe(self, request: RequestId, output_tokens: int) -> None:
        self._inner.observe(request, output_tokens)
        self._fail_if_due()

    def forget(self, request: RequestId) -> None:
        self._inner.forget(request)
        self._fail_if_due()

    def survival(
        self, requests: Sequence[RequestId], ages: "NDArray[np.int64]", steps: int
    ) -> "NDArray[np.float64]":
        fault = self._faults.due(predictor=True)
        if fault is DecisionFault.PREDICTOR_RAISES:
            raise self._faults.failure("predictor")
        answer = self._inner.survival(requests, ages, steps)
        if fault is DecisionFault.PREDICTOR_NAN and len(answer):
            self._faults.nonsense("predictor", "survival is not in 0..1")
            return np.full_like(answer, np.nan)
        return answer

    def _fail_if_due(self) -> None:
        if self._faults.due(predictor=True) is DecisionFault.PREDICTOR_RAISES:
            raise self._faults.failure("predictor")
