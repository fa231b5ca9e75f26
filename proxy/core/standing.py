"""Where a request stands, as the side that serves it sees it.

A scheduler that starts anew asks for this, see `RequestAdopted`. A driver in another process keeps it
for each request. It follows from what passes between the two, the events that the driver feeds and
the actions that reach it. So it is right also about what the earlier scheduler never read, and about
what it decided and never sent.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from balanceroute.proxy.core.avoidance import with_loss
from balanceroute.proxy.core.events import (
    AdoptedPhase,
    DecodeLost,
    DecodeStarted,
    Event,
    FirstToken,
    InBatch,
    InPool,
    InQueue,
    KvOnPrefiller,
    OnPrefiller,
    OnRank,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    RankId,
    RequestAdopted,
    RequestId,
    RequestRecomputed,
    Ticket,
)


class Standing:
    """Follows one request from its arrival to its end.

    Args:
        request: Its number, for the driver.
        ticket: As it arrived.
        now_ns: When it arrived.
    """

    __slots__ = (
        "_answered",
        "_counted_after",
        "_decode",
        "_emitted_before",
        "_kv",
        "_lapses",
        "_lost_on_prefillers",
        "_lost_on_ranks",
        "_phase",
        "_pooled_ns",
        "_prompt_tokens",
        "_request",
        "_served",
        "_ticket",
        "_waiting_since_ns",
    )

    def __init__(self, request: RequestId, ticket: Ticket, now_ns: int) -> None:
        self._request = request
        self._ticket = ticket
        self._phase: AdoptedPhase = InQueue()
        self._kv: KvOnPrefiller | None = None  # Until a rank has it.
        self._decode = ticket.decode
        self._prompt_tokens = ticket.prompt_tokens
        self._emitted_before = 0
        self._counted_after = 0  # As many of them are in `_prompt_tokens`.
        self._waiting_since_ns = now_ns
        self._pooled_ns: int | None = None
        self._served = self._answered = False
        self._lapses = 0
        self._lost_on_prefillers: tuple[PrefillerId, ...] = ()
        self._lost_on_ranks: tuple[RankId, ...] = ()
        if not ticket.prefill:
            self._to_pool(now_ns)

    def adoption(self, *, tokens: int) -> RequestAdopted:
        """Return what a scheduler has to know to go on.

        Args:
            tokens: What its sequences have emitted on the rank where it decodes.
        """
        phase = self._phase
        if isinstance(phase, InBatch):
            phase = InBatch(phase.rank, tokens, phase.pulled_from)
        return RequestAdopted(
            self._request,
            self._ticket,
            phase,
            prompt_tokens=self._prompt_tokens + self._emitted_before - self._counted_after,
            waiting_since_ns=self._waiting_since_ns,
            decode=self._decode,
            emitted_before=self._emitted_before,
            pooled_ns=self._pooled_ns,
            served=self._served,
            lapses=self._lapses,
            lost_on_prefillers=self._lost_on_prefillers,
            lost_on_ranks=self._lost_on_ranks,
            answered=self._answered,
        )

    def renumber(
        self,
        prefillers: Mapping[PrefillerId, PrefillerId],
        ranks: Mapping[RankId, RankId],
    ) -> bool:
        """Take the ids that another scheduler gives the instances.

        Args:
            prefillers: The new id by the old one; without those that the new scheduler lacks.
            ranks: Likewise.

        Returns:
            Whether it has those where the request is. If not, nothing was changed.
        """
        phase, kv = self._phase, self._kv
        try:
            if kv is not None:
                kv = replace(kv, prefiller=prefillers[kv.prefiller])
            match phase:
                case OnPrefiller(prefiller, since_ns):
                    phase = OnPrefiller(prefillers[prefiller], since_ns)
                case InPool():
                    phase = InPool(kv)
                case OnRank(rank):
                    phase = OnRank(ranks[rank], kv)
                case InBatch(rank, tokens, pulled_from):
                    # It is over: whom it was pulled from matters only if it has to be avoided.
                    known = None if pulled_from is None else prefillers.get(pulled_from)
                    phase = InBatch(ranks[rank], tokens, known)
                case InQueue():
                    pass
        except KeyError:
            return False
        self._phase, self._kv = phase, kv
        lost_on, lost_on_ranks = self._lost_on_prefillers, self._lost_on_ranks
        self._lost_on_prefillers = tuple(prefillers[one] for one in lost_on if one in prefillers)
        self._lost_on_ranks = tuple(ranks[one] for one in lost_on_ranks if one in ranks)
        return True

    # What the scheduler says.

    def start_prefill(self, prefiller: PrefillerId, now_ns: int) -> None:
        """Note `StartPrefill`."""
        self._phase = OnPrefiller(prefiller, now_ns)

    def start_decode(self, rank: RankId) -> None:
        """Note `Admit`."""
        self._phase = OnRank(rank, self._kv)

    def lease_ended(self, now_ns: int) -> None:
        """Note `ReleasePrefill`: the KV cache lapsed in the pool, unless it was reported lost."""
        if isinstance(self._phase, InPool):
            self._lapses += 1
            self._lose_kv(now_ns)

    def prefill_again(self, now_ns: int) -> None:
        """Note that the scheduler took a loss for a recompute."""
        self._wait_anew(now_ns)

    # What the driver feeds.

    def fed(self, event: Event, now_ns: int, emitted_before: int) -> None:
        """Note an event of this request.

        Args:
            event: What the scheduler was fed. The end of a request changes nothing.
            now_ns: When.
            emitted_before: Tokens that each sequence emitted in earlier bindings.
        """
        self._emitted_before = emitted_before
        match event:
            case PrefillDone(_, prompt_tokens, lease_expires_ns):
                assert isinstance(self._phase, OnPrefiller)
                self._kv = KvOnPrefiller(self._phase.prefiller, now_ns, lease_expires_ns)
                self._prompt_tokens, self._counted_after = prompt_tokens, emitted_before
                self._lost_on_prefillers = ()
                self._to_pool(now_ns)
            case FirstToken():
                self._answered = True
            case DecodeStarted():
                self._answered = True
                assert isinstance(self._phase, OnRank)
                pulled_from = None if self._kv is None else self._kv.prefiller
                self._phase = InBatch(self._phase.rank, 0, pulled_from)
                self._kv = None
                self._lost_on_ranks = ()
            case DecodeLost():
                self._lose_rank()
                self._to_pool(now_ns)
            case PrefillLost():
                self._lose_prefill(event, now_ns)
            case RequestRecomputed(_, elsewhere):
                if elsewhere:
                    self._lose_rank()
                    self._lose_prefiller()
                self._wait_anew(now_ns)
            case _:
                pass

    def _lose_prefill(self, event: PrefillLost, now_ns: int) -> None:
        if not event.same_rank:
            self._lose_rank()
        if event.elsewhere:
            self._lose_prefiller()
        self._lapses += isinstance(self._phase, InPool)
        self._decode = self._decode and event.decode
        self._lose_kv(now_ns)

    def _lose_rank(self) -> None:
        if isinstance(self._phase, OnRank | InBatch):
            self._lost_on_ranks = with_loss(self._lost_on_ranks, self._phase.rank)

    def _lose_prefiller(self) -> None:
        prefiller = None if self._kv is None else self._kv.prefiller
        if isinstance(self._phase, OnPrefiller):
            prefiller = self._phase.prefiller
        elif isinstance(self._phase, InBatch):
            prefiller = self._phase.pulled_from
        if prefiller is not None:
            self._lost_on_prefillers = with_loss(self._lost_on_prefillers, prefiller)

    def _wait_anew(self, now_ns: int) -> None:
        self._waiting_since_ns = now_ns
        self._served = True
        self._pooled_ns = None
        self._lapses = 0
        if self._ticket.prefill:
            self._to_queue()
        else:
            self._to_pool(now_ns)

    def _lose_kv(self, now_ns: int) -> None:
        if self._answered:
            self._waiting_since_ns = now_ns
        self._to_queue()

    def _to_queue(self) -> None:
        self._kv = None
        self._phase = InQueue()

    def _to_pool(self, now_ns: int) -> None:
        if self._pooled_ns is None:
            self._pooled_ns = now_ns
        self._phase = InPool(self._kv)
