"""What limits the starts of one scheduler's requests, measures them, and settles what they cost.

Each part may be missing, and then costs nothing.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from balanceroute.proxy.core.admission import Budget, FirstTokens, Load
from balanceroute.proxy.core.events import Observer, Ticket
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.lifecycle import LifecycleState, Request
from balanceroute.proxy.core.local_prefill import LocalPrefill
from balanceroute.proxy.core.prefill_queue import PrefillQueue
from balanceroute.proxy.core.queueing import FairQueueing, MakeQueueOrder, MakeStartOrder
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.ranks import Ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Start = TypeVar("_Start")


class Intake:
    """Passes on what its parts have to know.

    Attributes:
        fair: Shares what starts among tenants; None for no sharing.
        meter: Settles what it charged; None if nothing is to settle.
        budget: Limits the requests in flight; None for no limit.
        first_tokens: Expects times to first token; None if nobody asks.
        local_prefill: Decides which prompts ranks compute; None for none.
        memory: What the ranks have of earlier prompts; None if nobody asks.
        follows_time: Whether `advance` is to be called.
        held: Whether nothing may start; see `hold`.
        queues_all: Whether requests that need no prefiller may be in the queue, too.
    """

    def __init__(
        self,
        *,
        fair: FairQueueing | None = None,
        budget: Budget | None = None,
        first_tokens: FirstTokens | None = None,
        local_prefill: LocalPrefill | None = None,
        memory: RankMemory | None = None,
    ) -> None:
        self.fair = fair
        self.meter = None if fair is None else fair.meter
        self.budget = budget
        self.first_tokens = first_tokens
        self.local_prefill = local_prefill
        self.memory = memory if local_prefill is None else local_prefill.memory
        self.follows_time = budget is not None or first_tokens is not None
        self.held = False
        # What is to be expected of a wait is measured in the queue.
        self.queues_all = self.follows_time

    @property
    def observer(self) -> Observer | None:
        """What learns from every event; None for nothing."""
        return None if self.local_prefill is None else self.local_prefill.observe

    def orders(self, order: MakeQueueOrder) -> tuple[MakeStartOrder, MakeQueueOrder]:
        """Return what makes the order of each queue before prefill, and that of the pool."""
        fair = self.fair
        return (order, order) if fair is None else (fair.make_order, fair.make_pool)

    def advance(self, now_ns: int, requests: int, waiting: int) -> None:
        """Note the time before an event, and the requests until then: all, and before prefill."""
        if self.budget is not None:
            self.budget.advance(now_ns, demand=requests > 0)
        if self.first_tokens is not None:
            self.first_tokens.advance(now_ns, waiting=waiting > 0)

    def hold(self, *, held: bool) -> None:
        """Let nothing start from now on, or let it start again."""
        self.held = held
        self.queues_all = True  # From now on: some may be there when it is released.

    def room(self, room: int, held: int, ledger: Ledger, ranks: Ranks) -> int:
        """Return how many of `room` requests may start while `held` are in prefill or in the pool."""
        if self.budget is None:
            return room
        return min(room, self.budget.room(held + len(ledger), ranks.open))

    def let(self, starts: Iterable[_Start]) -> Iterable[_Start]:
        """Return those of the starts that could be which may be."""
        return () if self.held else starts

    def next_ns(self, waiting: int) -> int | None:
        """Return when a tick may let one of the waiting requests start; None for never."""
        return self.budget.next_tick_ns if waiting and self.budget is not None else None

    def load(self, ticket: Ticket, queue: PrefillQueue, waiting: int, requests: int) -> Load:
        """Return what an admission rule is told of a request that arrives."""
        if self.first_tokens is None:
            return Load(waiting)
        expected_ns = self.first_tokens.expected_ns(
            ticket.prompt_tokens, queue.ahead(ticket), early=_may_come_early(ticket)
        )
        return Load(waiting, expected_ns, idle=requests == 0)

    def left_queue(self, request: Request, now_ns: int) -> None:
        """Note that a request waits no longer before prefill."""
        request.left_queue_ns = now_ns
        if self.first_tokens is not None and now_ns > request.waiting_since_ns:
            self.first_tokens.started()

    def step(self, duration_ns: int | None, loads: "NDArray[np.int64]", now_ns: int) -> None:
        """Note a decode step, and int64[G], the KV tokens of the ranks after it."""
        if self.meter is not None:
            self.meter.step(duration_ns)
        if self.budget is not None and duration_ns is not None:
            self.budget.step(duration_ns, now_ns)
        if self.local_prefill is not None and duration_ns is not None:
            self.local_prefill.step(duration_ns, int(loads.max()))

    def started(self, request: Request, ledger: Ledger, now_ns: int) -> None:
        """Note that a request joined its rank's batch."""
        if self.meter is not None:
            tokens = ledger.kv_tokens(request.request)
            self.meter.begin(request.request, request.ticket, tokens)
        self.answered(request, now_ns)

    def answered(self, request: Request, now_ns: int) -> None:
        """Note that the client of a request has its first token now, unless it has it already."""
        if request.answered:
            return
        request.begin_answer()
        if self.budget is not None:
            self.budget.first_token(now_ns - request.arrived_ns, now_ns)
        if self.first_tokens is not None and request.left_queue_ns is not None:
            left_ns = request.left_queue_ns
            prefilled_ns = left_ns if request.prefilled_ns is None else request.prefilled_ns
            if request.state is LifecycleState.PREFILLING:  # The token is the prefiller's.
                prefilled_ns = now_ns
            self.first_tokens.came(
                request.prompt_tokens,
                max(0, prefilled_ns - left_ns),
                now_ns - prefilled_ns,
                early=_may_come_early(request.ticket),
            )


def _may_come_early(ticket: Ticket) -> bool:
    """Return whether a prefiller may say the first token that the client gets."""
    return ticket.early_token or not ticket.decode
