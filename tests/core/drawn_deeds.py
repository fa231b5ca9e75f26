"""What engines and clients do to a scheduler in a drawn order, and that no request waits for ever behind it."""

from balanceroute.proxy.core.events import (
    Action,
    DecodeLost,
    DecodeStarted,
    Eligible,
    PrefillDone,
    PrefillerClosed,
    PrefillerId,
    PrefillerOpened,
    PrefillLost,
    RankClosed,
    RankId,
    RankOpened,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.core.scheduler import Scheduler

INSTANCES = 3


class DrawnDeeds:
    """Performs what is drawn if it is possible, before so many instances of each role."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.who: list[Eligible | None] = []  # Where each request may go.

    def look_at(self, action: Action) -> None:
        """Check what the scheduler wants done."""
        raise NotImplementedError

    def feed(self, event: object) -> None:
        for action in self.scheduler.handle(event, now_ns=0):  # type: ignore[arg-type]
            self.look_at(action)
        self.scheduler.check()

    def arrive(self, who: Eligible | None, tokens: int) -> None:
        number = RequestId(len(self.who))
        self.who.append(who)
        self.feed(RequestArrived(number, Ticket(tokens, decode=tokens % 7 > 0, eligible=who)))

    def some(self, index: int, *states: LifecycleState, decode: bool = True) -> RequestId | None:
        found = [
            one.request
            for one in self.scheduler.requests.values()
            if one.state in states and not one.started and (one.decode or not decode)
        ]
        return found[index % len(found)] if found else None

    def do(self, deed: str, index: int) -> None:
        at_prefill, at_rank = LifecycleState.PREFILLING, LifecycleState.DECODING
        prefiller, rank = PrefillerId(index % INSTANCES), RankId(index % INSTANCES)
        close = index % 2
        match deed:
            case "tick":
                self.feed(Tick())
            case "close":
                self.feed(PrefillerClosed(prefiller) if close else RankClosed(rank))
            case "open":
                self.feed(PrefillerOpened(prefiller) if close else RankOpened(rank))
            case "prefill" if (number := self.some(index, at_prefill)) is not None:
                self.feed(PrefillDone(number, 10))
            case "lose prefill" if (number := self.some(index, at_prefill)) is not None:
                self.feed(PrefillLost(number, elsewhere=True))
            case "join" if (number := self.some(index, at_rank)) is not None:
                self.feed(DecodeStarted(number))
            case "bounce" if (number := self.some(index, at_rank)) is not None:
                self.feed(DecodeLost(number))
            case "recompute" if (number := self.some(index, at_rank)) is not None:
                self.feed(RequestRecomputed(number, elsewhere=True))
            case "finish":
                number = self.some(index, at_prefill, at_rank, decode=False)
                if number is not None:
                    self.feed(RequestFinished(number))
            case _:
                pass

    def open_all(self) -> None:
        for one in range(INSTANCES):
            self.feed(PrefillerOpened(PrefillerId(one)))
            self.feed(RankOpened(RankId(one)))

    def bring_to_an_end(self) -> None:
        """Open everything: then no request waits for ever."""
        self.open_all()
        for _ in range(4 * len(self.who)):
            for request in list(self.scheduler.requests.values()):
                if request.state is LifecycleState.PREFILLING and request.decode:
                    self.feed(PrefillDone(request.request, request.prompt_tokens))
                elif request.state in (LifecycleState.PREFILLING, LifecycleState.DECODING):
                    self.feed(RequestFinished(request.request))
            self.feed(Tick())
        assert not self.scheduler.requests, "a request waits for ever"
        assert not self.scheduler.prefill_queue.waiting
        assert not self.scheduler.prefill_queue._restricted
