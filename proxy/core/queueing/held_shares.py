"""Who is beyond its share of the decode ranks, when a slot is free and the pool is to choose.

`kv_meter` decides who starts; requests then wait in the pool, from which a policy takes what suits the
barrier, whoever sent it. With n slots and a share p that alone spreads the share of what runs by
sqrt(p (1 - p) / n): 8 points of 2 : 1 on 32 slots, for as long as requests stay. No order of the starts
undoes it, because a start takes effect only after the pool. So a tenant is held back while it holds

    more than its share + a mean request,

where shares are by weight among the tenants that a policy may choose from, of the KV tokens that these hold
on the ranks. A policy chooses freely among the others, unless the best of those suits the barrier much worse:
by more than an eighth of a mean prompt that overflows. So no slot is idle for shares, and where requests differ
much in size, balance goes first: what is left of a tenant in the pool is what suits the ranks least.

Bound. Where another tenant's choice is nearly as good, a tenant that takes a slot holds at most its share + a
mean request at the beginning of that round; a late request that has reserved a rank is exempt, and one round's choices
are not counted yet. Somebody may always be taken: not all hold more than their shares. Who is held back
gets no slot, so that it is held back no longer than the last of its requests runs, and a deadline in the pool
goes before all shares. Starts are counted as before, so that what tenants hold over a long time is bounded as
`kv_meter` says.
"""

from collections.abc import Iterable, Set
from typing import NamedTuple

from msgspec import Struct

from balanceroute.proxy.core.events import RequestId, Ticket


class _Held(Struct):
    """What a tenant or all hold: `tokens` at step 0, and since then one a step for each sequence."""

    requests: int = 0
    tokens: int = 0
    sequences: int = 0


class _Bound(NamedTuple):
    """What a request adds to the `_Held` of its tenant."""

    tenant: str
    tokens: int
    sequences: int


class HeldShares:
    """The KV tokens of each tenant's requests on the decode ranks, those on their way included.

    Attributes:
        steps: So many steps have passed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._held: dict[str, _Held] = {}
        self._all = _Held()
        self._bound: dict[RequestId, _Bound] = {}

    @property
    def bound(self) -> Set[RequestId]:
        """The requests that are on a rank, or on their way."""
        return self._bound.keys()

    def bind(self, request: RequestId, ticket: Ticket, kv_tokens: int) -> None:
        """Note that a request of `kv_tokens` has a rank; from now on it grows with each step."""
        tokens = kv_tokens - ticket.slots * self.steps
        bound = self._bound[request] = _Bound(ticket.tenant, tokens, ticket.slots)
        self._add(bound, 1)

    def unbind(self, request: RequestId) -> None:
        """Note that a request left its rank."""
        self._add(self._bound.pop(request), -1)

    def tokens(self, tenant: str) -> int:
        """Return what a tenant holds now."""
        held = self._held.get(tenant)
        return 0 if held is None else held.tokens + self.steps * held.sequences

    def held_back(self, tickets: Iterable[Ticket]) -> Set[str]:
        """Return the tenants that are to wait, of those of some requests; never all of them."""
        weights = {ticket.tenant: ticket.weight for ticket in tickets}
        if len(weights) < 2 or not self._bound:
            return frozenset()
        held = {tenant: self.tokens(tenant) for tenant in weights}
        everything = self._all
        spare = (everything.tokens + self.steps * everything.sequences) / everything.requests
        of_weight = sum(held.values()) / sum(weights.values())
        return {
            tenant
            for tenant, tokens in held.items()
            if tokens > of_weight * weights[tenant] + spare
        }

    def _add(self, bound: _Bound, sign: int) -> None:
        held = self._held.get(bound.tenant)
        if held is None:
            held = self._held[bound.tenant] = _Held()
        for one in (held, self._all):
            one.requests += sign
            one.tokens += sign * bound.tokens
            one.sequences += sign * bound.sequences
        if not held.requests:
            del self._held[bound.tenant]
