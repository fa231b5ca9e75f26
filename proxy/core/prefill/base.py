"""Which of the prefillers with room takes a request.

A prefill choice is one new file here and a line in the registry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from balanceroute.proxy.core.events import Observer, PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.setting import integer, number

if TYPE_CHECKING:
    import random

    from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks


class PrefillRequest(Struct, frozen=True):
    """A request that needs a prefiller.

    Attributes:
        request: Its id.
        ticket: Its ticket.
        tokens: Tokens that it is charged; more than in the ticket if it was recomputed.
        now_ns: The time.
    """

    request: RequestId
    ticket: Ticket
    tokens: int
    now_ns: int


class PrefillView(Protocol):
    """The prefillers as a choice sees them, indexed by prefiller. Read-only."""

    @property
    def held_tokens(self) -> Sequence[int]:
        """KV tokens held."""
        ...

    @property
    def prefills(self) -> Sequence[int]:
        """Running prefills."""
        ...

    @property
    def direct(self) -> Sequence[int]:
        """Sequences of direct requests."""
        ...


class PrefillChoice(Protocol):
    """Chooses the prefiller of a request."""

    @property
    def observer(self) -> Observer | None:
        """What the choice learns from: called with every event of the scheduler; None for nothing."""
        ...

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return one of the candidates, which then takes the request.

        Args:
            request: The request.
            candidates: The open prefillers with room for it, ascending; at least one.
            view: All prefillers.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScoreLimits:
    """Which prefillers are scored at all. None is no limit."""

    prefill_waiting_limit: int | None = integer(
        None,
        "with a --prefill-choice by score, requests that may wait on a prefiller",
        0,
        10**6,
        word="none",
    )
    prefill_running_limit: int | None = integer(
        None, "likewise, requests that may run on it", 0, 10**6, word="none"
    )
    prefill_share_limit: float | None = number(
        None,
        "likewise, its share of the requests between two scrapes",
        0.01,
        1,
        shown_default="no limit",
        word="none",
    )


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """What a prefill choice is made from.

    Attributes:
        rng: Seeded generator for the randomised ones.
        index_blocks: Blocks of prompts that are remembered of each prefiller.
        limits: For choices by a score.
        engine_blocks: What the prefillers themselves tell of their caches; None if nobody listens.
    """

    rng: "random.Random"
    index_blocks: int = 1 << 20
    limits: ScoreLimits = ScoreLimits()
    engine_blocks: "EngineBlocks | None" = None


MakePrefillChoice = Callable[[], PrefillChoice]


class Turns:
    """Chooses the least of several prefillers; equal ones take turns.

    So no one of several idle ones gets every request.
    """

    def __init__(self) -> None:
        self._choices = 0
        self._last_choice: dict[PrefillerId, int] = {}

    def least(
        self, candidates: Sequence[PrefillerId], cost: Callable[[PrefillerId], float]
    ) -> PrefillerId:
        """Return the candidate of the lowest cost; of equal ones that chosen least recently."""
        last, chosen = self._last_choice, candidates[0]
        if len(candidates) > 1:
            chosen = min(candidates, key=lambda one: (cost(one), last.get(one, 0)))
        self._choices += 1
        self._last_choice[chosen] = self._choices
        return chosen
