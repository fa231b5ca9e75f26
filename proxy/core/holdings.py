"""What requests hold, and how they give it back.

A queued request has a place in its line, a prefilling one the budget of a prefiller, a pooled one its
place in the pool, and a decoding one slots and KV tokens of a rank. The budget of the prefiller stays
charged until the KV cache has left it.
"""

from collections.abc import Iterable

from balanceroute.proxy.core.events import AbortDecode, AbortPrefill, Action, ReleasePrefill
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.lifecycle import Request, State
from balanceroute.proxy.core.pool import Pool
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.prefill_queue import PrefillQueue


class Holdings:
    """The books of one scheduler.

    Attributes:
        ledger: Of the ranks; another one once their number or the policy changes.
    """

    def __init__(
        self, prefill_queue: PrefillQueue, prefillers: Prefillers, pool: Pool, ledger: Ledger
    ) -> None:
        self.ledger = ledger
        self._prefill_queue = prefill_queue
        self._prefillers = prefillers
        self._pool = pool

    def release(self, request: Request, state: State, *, gone: bool) -> list[Action]:
        """Release everything that `request` held in `state`.

        `gone` says that the engine has ended its part already, so that there is nothing to abort.
        """
        actions: list[Action] = []
        match state:
            case State.QUEUED:
                self._prefill_queue.remove(request)
            case State.PREFILLING:
                assert request.prefiller is not None
                if request.decode:
                    self.end_prefill(request)
                else:
                    self._prefillers.end_direct(request.prefiller, request.ticket.slots)
                if not gone:
                    actions.append(AbortPrefill(request.request, request.prefiller))
            case State.POOLED:
                self._pool.remove(request.request)
                if request.prefiller is not None:
                    actions.append(ReleasePrefill(request.request, request.prefiller))
            case State.DECODING:
                if not gone:
                    assert request.rank is not None
                    actions.append(AbortDecode(request.request, request.rank))
                    if request.prefiller is not None:
                        # Nobody will pull these blocks any more, unless the pull is under way.
                        actions.append(ReleasePrefill(request.request, request.prefiller))
                self.release_prefill(request)
                self.unbind(request)
            case State.DONE | State.FAILED | State.CANCELLED:
                raise AssertionError(f"request {request.request} ended twice")
        self.release_prefill(request)
        return actions

    def end_prefill(self, request: Request) -> None:
        """Note that its prefill ended."""
        assert request.prefiller is not None
        assert request.prefilling
        self._prefillers.end_prefill(request.prefiller)
        request.prefilling = False

    def release_prefill(self, request: Request) -> None:
        """Uncharge its prefiller, if it holds one."""
        if request.prefiller is not None:
            self._prefillers.release(request.prefiller, request.held_tokens)
            request.prefiller = None

    def unbind(self, request: Request) -> None:
        """Take it from its rank."""
        held = self.ledger.unbind(request.request)
        # If it is decoded again, what it emitted has to be prefilled with the prompt.
        emitted = -((request.kv_tokens - held) // request.ticket.slots)  # Rounded up.
        request.emitted_before += emitted
        request.prompt_tokens += emitted
        request.rank = None
        request.started = False

    def move(self, requests: Iterable[Request], ledger: Ledger) -> None:
        """Charge all bound requests to a new ledger as they stand in the present one."""
        for request in requests:
            if request.rank is None:
                continue
            number = request.request
            ledger.bind(
                number,
                request.rank,
                request.kv_tokens,
                age=request.emitted_before,
                slots=request.ticket.slots,
            )
            ledger.emit(number, self.ledger.kv_tokens(number) - request.kv_tokens)
            if request.started:
                ledger.start(number)
        self.ledger = ledger
