"""Prefiller budgets: which prefillers may take the next request, and how much each one still holds.

A prefiller is charged a request's prompt tokens from the start of its prefill until the KV cache has
left it: until the first decoded token, or a release. A **direct** request, which a prefiller answers
whole, is charged the prompt of each sequence until it ends. It counts with its sequences against
`direct_limit`, not as a prefill. `Prefillers` only counts, when the scheduler calls it. A
`PrefillChoice` selects among the prefillers with room.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    Action,
    Eligible,
    Event,
    Observer,
    PrefillerId,
    RankId,
    RequestId,
    Ticket,
)
from balanceroute.proxy.core.setting import integer, number, weights
from balanceroute.proxy.core.warm_up import WarmUp, allowed

if TYPE_CHECKING:
    import random

    from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks


# Which of the prefillers with room takes a request.
#
# A prefill choice is one new file here and a line in the registry.


class PrefillRequest(Struct, frozen=True):
    request: RequestId  # Its id.
    ticket: Ticket  # Its ticket.
    tokens: int  # Tokens that it is charged; more than in the ticket if it was recomputed.
    now_ns: int  # The time.


class PrefillView(Protocol):
    """The prefillers as a choice sees them, indexed by prefiller. Read-only."""

    @property
    def held_tokens(self) -> Sequence[int]: ...

    @property
    def prefills(self) -> Sequence[int]: ...

    @property
    def direct(self) -> Sequence[int]: ...


class PrefillChoice(Protocol):
    """Chooses the prefiller of a request."""

    @property
    def observer(self) -> Observer | None:
        """Learns from every event of the scheduler, for the choice; None for nothing."""
        ...

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return one of the candidates, which then takes the request.

        Args:
            candidates: The open prefillers with room for it, ascending; at least one.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """The weights of scores, and the limits beyond which a prefiller has none. None is no limit."""

    # As the source suggests.
    s1_weights: tuple[float, ...] = weights(
        (0.1, 0.9),
        "what waiting requests and KV cache use weigh in s1-enhanced's score",
        metavar="A,B",
    )
    s2_weights: tuple[float, ...] = weights(
        (0.5, 0.5, 0.0),
        "likewise in s2-enhanced's, with running requests",
        metavar="A,B,G",
    )
    s2_dynamic_weights: tuple[float, ...] = weights(
        (0.4, 0.3, 0.3),
        "likewise in s2-dynamic-waiting's, where they shift with the requests that wait",
        metavar="A,B,G",
    )
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
    rng: "random.Random"  # Seeded generator for the randomised ones.
    index_blocks: int = 1 << 20  # Blocks of prompts that are remembered of each prefiller.
    scores: ScoreSettings = ScoreSettings()  # For choices by a score.
    # The blocks that prefillers report; None if the proxy does not listen.
    engine_blocks: "EngineBlocks | None" = None


MakePrefillChoice = Callable[[], PrefillChoice]


class Turns:
    """Chooses the least of several prefillers; equal ones take turns.

    So no one of several idle ones gets every request.
    """

    observer: Observer | None = None

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


class FewestTokens(Turns):
    """The candidate that holds the fewest KV tokens; equal ones take turns."""

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request
        return self.least(candidates, view.held_tokens.__getitem__)


# Which ranks can use the KV caches of which prefillers.
#
# Engines of two versions, or with KV caches of two kinds, may serve side by side while a fleet is
# updated. A request then goes from its prefiller to one of those ranks that can read its KV
# cache, and no prefiller computes a prompt that no open rank could take over.


class Pairs:
    """The pairs that are allowed; all of them at first, and all ranks are open."""

    def __init__(self) -> None:
        self._ranks: dict[PrefillerId, frozenset[RankId]] = {}
        self._closed: set[RankId] = set()
        self.limited = False  # Whether some pair is not allowed.

    def set(self, prefiller: PrefillerId, ranks: frozenset[RankId] | None) -> None:
        """Allow a prefiller these ranks alone; None for all, also those that are added later."""
        if ranks is None:
            self._ranks.pop(prefiller, None)
        else:
            self._ranks[prefiller] = ranks
        self.limited = bool(self._ranks)

    def set_open(self, rank: RankId, is_open: bool) -> None:
        """Note whether a rank takes new requests."""
        (self._closed.discard if is_open else self._closed.add)(rank)

    def ranks_of(self, prefiller: PrefillerId | None) -> frozenset[RankId] | None:
        """Return the only ranks that can use a prefiller's KV caches; None for all."""
        return None if prefiller is None else self._ranks.get(prefiller)

    def feeds(self, prefiller: PrefillerId, eligible: Eligible | None = None) -> bool:
        """Return whether an open rank can use a prefiller's KV caches; only `eligible` ranks, None for all.

        True for a prefiller without pairs.
        """
        ranks = self._ranks.get(prefiller)
        if ranks is None:
            return True
        if eligible is not None:
            ranks &= eligible.ranks
        return bool(ranks - self._closed)


# Prefills at a time from which a prefiller is warm, unless it may not have so many.
_WARM = 8


class Prefillers:
    """Running prefills and KV tokens of P prefillers.

    Args:
        instances: Number of prefillers, P. All are open at first.
        probe_limit: Prefills that may run on one prefiller at a time; None for no limit.
        kv_capacity_tokens: KV tokens that one prefiller may hold; None for no limit. A prompt
            larger than this still goes to an empty prefiller, so that it fails there with the
            engine's own error instead of waiting here for ever.
        direct_limit: Sequences of direct requests on one prefiller at a time; None for no limit. A
            request with more still goes to a prefiller that has none.
        choice: Selects among the prefillers with room.
    """

    def __init__(
        self,
        instances: int,
        *,
        probe_limit: int | None = None,
        kv_capacity_tokens: int | None = None,
        direct_limit: int | None = None,
        choice: PrefillChoice,
    ) -> None:
        self.is_open: list[bool] = []  # By prefiller, whether it takes new requests.
        # By prefiller, whether it may hold only one request at a time.
        self.on_trial: list[bool] = []
        self.prefills: list[int] = []  # By prefiller, running prefills.
        self.prefilling = 0  # Their sum.
        self.direct: list[int] = []  # By prefiller, sequences of direct requests.
        self.held_tokens: list[int] = []  # By prefiller, KV tokens held.
        self.pairs = Pairs()  # The ranks that can use each one's KV caches.
        # By prefiller, whether it has finished a prefill since it began.
        self.proved: list[bool] = []
        self.warm_up = WarmUp()  # The windows of those that began lately.
        self._choice = choice
        self.reconfigure(
            instances,
            probe_limit=probe_limit,
            kv_capacity_tokens=kv_capacity_tokens,
            direct_limit=direct_limit,
        )

    def reconfigure(
        self,
        instances: int,
        *,
        probe_limit: int | None,
        kv_capacity_tokens: int | None,
        direct_limit: int | None,
    ) -> None:
        """Change the limits, and grow to `instances` prefillers; the new ones are open."""
        new = instances - len(self.prefills)
        assert new >= 0, "prefillers cannot shrink"
        self.is_open += [True] * new
        self.on_trial += [False] * new
        self.prefills += [0] * new
        self.direct += [0] * new
        self.held_tokens += [0] * new
        self.proved += [False] * new
        # A limit may fall below the present use. Then nothing starts until enough has ended.
        self._probe_limit = probe_limit
        self._direct_limit = direct_limit
        self.kv_capacity_tokens = kv_capacity_tokens

    def set_open(self, prefiller: PrefillerId, is_open: bool, *, on_trial: bool = False) -> None:
        """Let a prefiller take new requests, or none; `on_trial` as in `PrefillerOpened`.

        Raises:
            LifecycleError: The prefiller is unknown.
        """
        self.check_known(prefiller)
        self.is_open[prefiller] = is_open
        self.on_trial[prefiller] = on_trial
        if not is_open:
            self.proved[prefiller] = False
            self.warm_up.end(prefiller)

    def begin(self, prefiller: PrefillerId) -> None:
        """Give an open prefiller a window that grows, unless all are as new as it is; see `WarmUp`."""
        if any(one and able for one, able in zip(self.proved, self.is_open, strict=True)):
            self.warm_up.begin(prefiller, grows=True)
        self.proved[prefiller] = False

    def saw(self, event: Event, actions: Sequence[Action]) -> None:
        """Follow the requests on their way to prefillers with a window."""
        full = _WARM if self._probe_limit is None else min(_WARM, self._probe_limit)
        self.warm_up.saw(event, actions, [full] * len(self.is_open))

    def check_known(self, prefiller: PrefillerId) -> None:
        """Raise LifecycleError if there is no such prefiller."""
        if not 0 <= prefiller < len(self.is_open):
            raise LifecycleError(f"prefiller {prefiller} is unknown: there are {len(self.is_open)}")

    def choose(
        self,
        request: PrefillRequest,
        lost_on: Sequence[PrefillerId] = (),
        *,
        sequences: int = 0,
        among: Collection[PrefillerId] | None = None,
        withheld: Collection[PrefillerId] = (),
    ) -> PrefillerId | None:
        """Return the prefiller that takes a request, or None if the request has to wait.

        Args:
            lost_on: Prefillers to avoid while another one is open, the earliest loss first.
            sequences: Sequences of a direct request; 0 for a prefill.
            among: The only prefillers that can serve it; None for all.
            withheld: Prefillers that an earlier request waits for.
        """
        # Trials before losses: a busy prefiller on trial counts as closed, and `allowed` ignores
        # losses only if everything else is closed.
        is_open = self.is_open if among is None else self._open(among)
        if self.pairs.limited and not sequences:
            eligible = request.ticket.eligible
            is_open = [
                able and self.pairs.feeds(PrefillerId(number), eligible)
                for number, able in enumerate(is_open)
            ]
        is_open = self._tried(is_open, lost_on) if True in self.on_trial else is_open
        is_open = allowed(is_open, lost_on) if lost_on else is_open
        if self.warm_up.active and self.warm_up.binds(is_open):
            is_open = [able and self.warm_up.room(one) != 0 for one, able in enumerate(is_open)]
        if withheld:
            is_open = [able and number not in withheld for number, able in enumerate(is_open)]
        limit = self._direct_limit if sequences else self._probe_limit
        # Ascending, so that a choice breaks its ties in a fixed order.
        candidates = [
            PrefillerId(prefiller)
            for prefiller, able in enumerate(is_open)
            if able
            and (limit is None or self._has_place(prefiller, sequences))
            and (self.kv_capacity_tokens is None or self._has_memory(prefiller, request.tokens))
        ]
        if not candidates:
            return None
        chosen = self._choice.choose(request, candidates, self)
        # A prefiller outside of them would be overfilled without notice.
        assert chosen in candidates, f"prefiller {chosen} has no room or is closed"
        return chosen

    def cached_tokens(self, request: PrefillRequest) -> dict[PrefillerId, int] | None:
        """Return the tokens of a prompt that each prefiller should have; None if the choice ignores them."""
        memory: Any = getattr(self._choice, "memory", None)  # A `PrefixMemory`.
        if memory is None:
            return None
        found = memory.expect(request, [PrefillerId(one) for one in range(len(self.is_open))])
        return {one: expected.cached_tokens for one, expected in found.items()}

    def begin_prefill(self, prefiller: PrefillerId, prompt_tokens: int) -> None:
        self.prefills[prefiller] += 1
        self.prefilling += 1
        self.held_tokens[prefiller] += prompt_tokens

    def begin_direct(self, prefiller: PrefillerId, prompt_tokens: int, sequences: int) -> None:
        self.direct[prefiller] += sequences
        self.held_tokens[prefiller] += prompt_tokens

    def end_direct(self, prefiller: PrefillerId, sequences: int) -> None:
        """Count a direct request no more; its tokens stay charged until `release`."""
        assert self.direct[prefiller] >= sequences, f"prefiller {prefiller} has none to end"
        self.direct[prefiller] -= sequences

    def waits_for_memory(
        self, sequences: int, among: Collection[PrefillerId] | None = None
    ) -> bool:
        """Return whether a waiting direct request lacks nothing but KV tokens on some prefiller."""
        return any(
            # One on trial is closed to further requests, which is no lack of memory.
            is_open and not self.on_trial[prefiller] and self._has_place(prefiller, sequences)
            for prefiller, is_open in enumerate(self._open(among))
        )

    def correct(self, prefiller: PrefillerId, *, charged_tokens: int, prompt_tokens: int) -> None:
        """Replace a request's estimated prompt length by the counted one."""
        # As a release and a charge, since the release asserts that the estimate was charged.
        self.release(prefiller, charged_tokens)
        self.held_tokens[prefiller] += prompt_tokens

    def end_prefill(self, prefiller: PrefillerId) -> None:
        """Count a prefill no more; its tokens stay charged until `release`."""
        assert self.prefills[prefiller] > 0, f"prefiller {prefiller} has no prefill to end"
        self.prefills[prefiller] -= 1
        self.prefilling -= 1

    def release(self, prefiller: PrefillerId, prompt_tokens: int) -> None:
        """Release the tokens of a request whose KV cache left the prefiller."""
        assert self.held_tokens[prefiller] >= prompt_tokens, f"prefiller {prefiller} released twice"
        self.held_tokens[prefiller] -= prompt_tokens

    def _open(self, among: Collection[PrefillerId] | None) -> list[bool]:
        if among is None:
            return self.is_open
        return [is_open and number in among for number, is_open in enumerate(self.is_open)]

    def _tried(self, is_open: list[bool], lost_on: Sequence[PrefillerId]) -> list[bool]:
        """Return which prefillers are open to a request, if some are on trial.

        A prefiller on trial that holds a request is closed until that request shows whether it
        works. A request that was lost before goes to one on trial only if no other is open.
        """
        is_open = list(is_open)
        for prefiller, held in enumerate(self.held_tokens):
            # One that holds nothing may take a request: that is its trial.
            is_open[prefiller] &= not (held and self.on_trial[prefiller])
        if lost_on:
            proven = [
                able and not tried for able, tried in zip(is_open, self.on_trial, strict=True)
            ]
            if any(proven):
                return proven
        return is_open

    def _has_place(self, prefiller: int, sequences: int) -> bool:
        if not sequences:
            return self._probe_limit is None or self.prefills[prefiller] < self._probe_limit
        # With none there, a request of more sequences than the limit starts too, or it never would.
        direct = self.direct[prefiller]
        return self._direct_limit is None or not direct or direct + sequences <= self._direct_limit

    def _has_memory(self, prefiller: int, prompt_tokens: int) -> bool:
        # An empty prefiller takes any prompt, see `kv_capacity_tokens`.
        held = self.held_tokens[prefiller]
        if self.kv_capacity_tokens is None or held == 0:
            return True
        return held + prompt_tokens <= self.kv_capacity_tokens
