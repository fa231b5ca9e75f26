"""`kv-token-seconds`: what a request holds on a decode rank, in KV tokens times seconds.

Tenants pay for what their requests hold as time passes, not in advance: a request that is charged at
its start with all that it will hold makes its tenant wait for others to catch up with something that
has not happened yet. But what starts now is held only later. So a start also deposits what the
request holds in the next seconds, and gets it back when it ends. A tenant's counter so is

    KV token-seconds held until now + T x KV tokens of its requests in flight,

divided by its weight. With e the difference of what two tenants held by weight, equal counters mean
e + T de/dt = 0: a difference decays within some T, without swinging over. T is a part of the mean time
that requests stay on their ranks.
"""

from dataclasses import dataclass

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing.fair import FairShares

_NS_PER_S = 1e9
# Before the first step that is measured, and the first end.
_FIRST_STEP_S = 0.05
_FIRST_STAY_S = 8.0
# Weights in the running means, which so cover about 64 steps and 128 requests.
_STEP_WEIGHT = 1 / 64
_STAY_WEIGHT = 1 / 128
# Of the mean stay. Shares of tenants that take their turns by less swing, because the requests that run
# leave too slowly; by more, they follow their weights later. Measured with stays of 3 s and of 20 s.
_AHEAD = 1 / 8


@dataclass(slots=True)
class _Held:
    """What a tenant's requests in decode hold since `elapsed_s`, growing by a token a step."""

    tokens: int = 0
    sequences: int = 0
    elapsed_s: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Began:
    """When a request began to decode, and its KV tokens then."""

    elapsed_s: float
    steps: int
    tokens: int


class KvMeter:
    """Measures what requests hold, and has their tenants pay for it.

    Attributes:
        shares: Charged with deposits, and with what was held since the last charge.
    """

    def __init__(self) -> None:
        self.shares = FairShares(self.deposit, deposits=True)
        self._step_s = 0.0
        self._stay_s = _FIRST_STAY_S
        # The time of all steps, and their number.
        self._elapsed_s = 0.0
        self._steps = 0
        self._held: dict[str, _Held] = {}
        self._began: dict[RequestId, _Began] = {}

    def deposit(self, ticket: Ticket) -> float:
        """Return what a start deposits, in KV token-seconds; above 0. Its tenant pays what it owes."""
        self._pay(ticket.tenant)
        return ticket.prompt_tokens * _AHEAD * self._stay_s

    @property
    def unsettled(self) -> int:
        """Requests that were charged, or joined a batch, and have not ended."""
        return len(self.shares.unsettled | self._began.keys())

    def step(self, duration_ns: int | None) -> None:
        """Note a step; one that was not measured took as long as the others."""
        self._steps += 1
        if duration_ns is None:
            self._elapsed_s += self._step_s or _FIRST_STEP_S
            return
        step_s = duration_ns / _NS_PER_S
        self._elapsed_s += step_s
        self._step_s += _STEP_WEIGHT * (step_s - self._step_s) if self._step_s else step_s

    def begin(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request of `kv_tokens` joined its rank's batch."""
        held = self._pay(ticket.tenant)
        held.tokens += kv_tokens
        held.sequences += ticket.slots
        self._began[request] = _Began(self._elapsed_s, self._steps, kv_tokens)

    def end(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request left its rank with `kv_tokens`, or ended before it joined a batch."""
        self.shares.give_back(request, ticket.tenant)
        began = self._began.pop(request, None)
        if began is None:
            return
        held = self._pay(ticket.tenant)
        grown = began.tokens + ticket.slots * (self._steps - began.steps)
        held.tokens -= grown
        held.sequences -= ticket.slots
        if not held.sequences:
            del self._held[ticket.tenant]
        # Where it emitted other than a token a step, the mean is still halfway.
        stay_s = self._elapsed_s - began.elapsed_s
        self.shares.owe(ticket.tenant, (kv_tokens - grown) / 2 * stay_s)
        self._stay_s += _STAY_WEIGHT * (stay_s - self._stay_s)

    def end_direct(self, request: RequestId) -> None:
        """Note the end of a request that held no rank: its deposit stands for its cost."""
        self.shares.keep(request)

    def _pay(self, tenant: str) -> _Held:
        """Have a tenant owe what its requests held since the last time."""
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = _Held()
        steps, passed_s = self._steps - held.steps, self._elapsed_s - held.elapsed_s
        # The steps since then are taken as equally long.
        grown = held.sequences * steps
        self.shares.owe(tenant, (held.tokens + grown / 2) * passed_s)
        held.tokens += grown
        held.steps, held.elapsed_s = self._steps, self._elapsed_s
        return held
