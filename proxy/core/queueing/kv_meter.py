"""`kv-token-seconds`: what a request holds on a decode rank, in KV tokens times seconds.

Tenants pay for what their requests hold as time passes, not in advance: a request that is charged at
its start with all that it will hold makes its tenant wait for others to catch up with something that
has not happened yet. But what starts now is held only later. So a start also deposits what the
request holds in a time T, and gets it back when it ends. A tenant's counter so is

    KV token-seconds held until now + T x KV tokens of its requests in flight,

divided by its weight w, and each start goes to the lowest counter.

Bound. With M the most KV tokens that are in flight and L the largest deposit, the counters of two tenants
that wait differ by at most about L / w after each start, so what they held by weight differs by at most
(T M + L) / w, over any time. It is the difference that a window of length W may show: T / W of what is
held, and a few requests.

Choice of T. A request that starts joins its rank a delay P later (prefill, pool), and stays for S on
average. If phi is the Laplace transform of the stays and psi = (1 - phi) / (s S) that of what is left of
one that runs, equal counters mean that a difference in starts is answered by the later ones with

    e^(-s P) (phi - psi / A),  A = T / S.

Below 1 at all frequencies it dies out, however long P is. A slow difference is answered by |1 - 1 / A|:
seven times at A = 1/8, so that shares swing to their limits, and half of it at A = 2. That is the largest
answer for stays without memory; it is 0.71 for stays between half and one and a half times their mean (0.83
at A = 1), and 1.12 (1.26) for stays that are all alike, which the pool damps, as some wait there for longer
than others. A larger A adds little, and a difference decays within T.
"""

from dataclasses import dataclass

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing.fair import FairShares
from balanceroute.proxy.core.queueing.held_shares import HeldShares

_NS_PER_S = 1e9
# Before the first step that is measured.
_FIRST_STEP_S = 0.05
# Weights in the running means, which so cover about 64 steps and 128 requests.
_STEP_WEIGHT = 1 / 64
_STAY_WEIGHT = 1 / 128
# A: T in mean stays.
_AHEAD = 2.0
# T stays as it is while the measured one is within this factor. All deposits are made anew when it
# changes: old and new ones side by side would favour who has the dearer ones.
_RANGE = 1.25
# Of its deposit, what a request pays that only a prefiller answers.
_DIRECT = 1 / 16


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
        shares: Charged with deposits, and with what is held.
        held_shares: Who goes from the pool.
    """

    def __init__(self) -> None:
        self.shares = FairShares(self.deposit, deposits=True)
        self.held_shares = HeldShares()
        self._step_s = 0.0
        # Of the requests that ended, the later ones with more weight: their number, how long they stayed,
        # and what they held beyond their prompts, for each sequence.
        self._ended = 0.0
        self._stay_s = 0.0
        self._grown = 0.0
        # T.
        self._ahead_s = _AHEAD * _FIRST_STEP_S
        # The time of all steps, and their number.
        self._elapsed_s = 0.0
        self._steps = 0
        self._held: dict[str, _Held] = {}
        self._began: dict[RequestId, _Began] = {}

    def deposit(self, ticket: Ticket) -> float:
        """Return what a start deposits, in KV token-seconds; above 0. Its tenant pays what it held."""
        self._pay(ticket)
        self._look_ahead()
        grown = self._grown / self._stay_s if self._stay_s else 0.0
        return (ticket.prompt_tokens + ticket.slots * grown) * self._ahead_s

    @property
    def unsettled(self) -> int:
        """Requests that were charged, have a rank, or joined a batch, and have not ended."""
        return len(self.shares.unsettled | self._began.keys() | self.held_shares.bound)

    def step(self, duration_ns: int | None) -> None:
        """Note a step; one that was not measured took as long as the others."""
        self._steps += 1
        self.held_shares.steps += 1
        if duration_ns is None:
            self._elapsed_s += self._step_s or _FIRST_STEP_S
            return
        step_s = duration_ns / _NS_PER_S
        self._elapsed_s += step_s
        self._step_s += _STEP_WEIGHT * (step_s - self._step_s) if self._step_s else step_s

    def begin(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request of `kv_tokens` joined its rank's batch."""
        held = self._pay(ticket)
        held.tokens += kv_tokens
        held.sequences += ticket.slots
        self._began[request] = _Began(self._elapsed_s, self._steps, kv_tokens)

    def end(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request left its rank with `kv_tokens`, or ended before it joined a batch."""
        began = self._began.pop(request, None)
        if began is None:
            self.shares.give_back(request)
            return
        held = self._pay(ticket)
        grown = began.tokens + ticket.slots * (self._steps - began.steps)
        held.tokens -= grown
        held.sequences -= ticket.slots
        if not held.sequences:
            del self._held[ticket.tenant]
        # Where it emitted other than a token a step, the mean is still halfway.
        stay_s = self._elapsed_s - began.elapsed_s
        self.shares.owe(ticket, (kv_tokens - grown) / 2 * stay_s)
        self.shares.give_back(request)
        of_a_sequence = (kv_tokens - began.tokens) / 2 * stay_s / ticket.slots
        self._ended += 1.0 - _STAY_WEIGHT * self._ended
        self._stay_s += stay_s - _STAY_WEIGHT * self._stay_s
        self._grown += of_a_sequence - _STAY_WEIGHT * self._grown
        self._look_ahead()

    def end_direct(self, request: RequestId) -> None:
        """Note the end of a request that held no rank: a part of its deposit stands for its cost."""
        self.shares.give_back(request, 1.0 - _DIRECT)

    def _look_ahead(self) -> None:
        """Set T anew where it has left its range, and all deposits with it."""
        if self._ended:
            stay_s = self._stay_s / self._ended
        else:
            # Nothing ended yet, so that requests stay for longer than the first one has run.
            first = next(iter(self._began.values()), None)
            stay_s = self._elapsed_s - first.elapsed_s if first else 0.0
        ahead_s = _AHEAD * max(stay_s, self._step_s or _FIRST_STEP_S)
        if not self._ahead_s / _RANGE <= ahead_s <= self._ahead_s * _RANGE:
            self.shares.scale_deposits(ahead_s / self._ahead_s)
            self._ahead_s = ahead_s

    def _pay(self, ticket: Ticket) -> _Held:
        """Have a request's tenant pay what its requests held since the last time."""
        held = self._held.get(ticket.tenant)
        if held is None:
            held = self._held[ticket.tenant] = _Held()
        steps, passed_s = self._steps - held.steps, self._elapsed_s - held.elapsed_s
        # The steps since then are taken as equally long.
        grown = held.sequences * steps
        self.shares.owe(ticket, (held.tokens + grown / 2) * passed_s)
        held.tokens += grown
        held.steps, held.elapsed_s = self._steps, self._elapsed_s
        return held
