"""A request of a relay, as the scheduler process knows it: what is decided goes there as messages.

It is where the relay's events and the orders given say that it is, which may be a moment behind or
ahead of the relay. See rule 5 of docs/relay_protocol.md for what crosses.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.request.reports import LegSucceeded

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId, Ticket
    from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Rank, Target
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.scheduling.pushed_counts import PushedCounts
    from balanceroute.proxy.live.telemetry.record import RequestRecord


class RemoteRequest:
    """One request; see `LiveRequest`.

    Args:
        number: The scheduler's.
        theirs: The relay's number of it.
        row: Names it in `Progress`.
        record: As the relay told it; kept up to date as far as the scheduler process knows.
        counts: How far streams are.
        send: Sends a message to the relay.
        clock: The loop's time.

    Attributes:
        offset: The step clock's; unused, as progress comes in arrays.
        emitted_before: Tokens of earlier bindings, of all sequences.
        heard: Core events taken.
        given: Bindings ordered, without void ones.
    """

    __slots__ = (
        *("_at", "_clock", "_counts", "_crashed", "_kv", "_pooled_s", "_pulls", "_rank"),
        *("_remote", "_send", "emitted_before", "given", "heard", "number", "offset", "record"),
        *("row", "shape", "theirs", "ticket"),
    )

    def __init__(
        self,
        number: "RequestId",
        theirs: int,
        row: int,
        *,
        ticket: "Ticket",
        shape: "Shape",
        record: "RequestRecord",
        counts: "PushedCounts[RemoteRequest]",
        send: Callable[[to_relay.ToRelay], None],
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.theirs = theirs
        self.row = row
        self.ticket = ticket
        self.shape = shape
        self.record = record
        self.offset = self.emitted_before = self.heard = self.given = 0
        self._counts = counts
        self._send = send
        self._clock = clock
        self._pooled_s = 0.0
        self._crashed = False
        # Who prefills it or does all of it; who holds its KV cache, with its losses by then; who
        # prefills it for a rank; and which rank it is bound to.
        self._at: Prefiller | None = None
        self._kv: tuple[Prefiller, int] | None = None
        self._remote: Prefiller | None = None
        self._rank: Rank | None = None
        self._pulls = False

    @property
    def streamed(self) -> bool:
        """Whether its answer is a stream, of which the relay tells how far it is."""
        return self.shape.stream

    @property
    def rounds(self) -> int | None:
        """Tokens that each sequence has emitted on this binding; None if it is not streamed."""
        return self._counts.rounds(self.row) if self.streamed else None

    @property
    def emitted_tokens(self) -> int:
        """Tokens emitted so far, as far as a stream tells."""
        return self._counts.emitted(self.row)

    @property
    def pair(self) -> "tuple[Prefiller, Rank] | None":
        """Who is to pull its KV cache from whom; None unless a decode leg has yet to begin so."""
        if self._kv is None or self._rank is None or not self._pulls:
            return None
        return self._kv[0], self._rank

    @property
    def targets(self) -> "list[Target]":
        """The instances that may work for this request, or hold its KV cache."""
        holder = None if self._kv is None else self._kv[0]
        engines = (self._at, self._rank, self._remote, holder)
        return [engine.target for engine in engines if engine is not None]

    def is_on(self, target: "Target") -> bool:
        """Return whether an instance is one of these."""
        return target in self.targets

    def check_deadline(self, now_s: float) -> None:
        """Do nothing: relays look after their legs."""

    # What the relay says.

    def adopt(self, live: from_relay.Live, instances: "Instances") -> None:
        """Note where a request is that an earlier scheduler process accepted."""
        prefiller = None if live.prefiller is None else instances.prefillers[live.prefiller]
        self._rank = None if live.rank is None else instances.ranks[live.rank]
        if live.phase == "prefilling":
            self._at = prefiller
        elif live.phase != "decoding" and prefiller is not None:
            self._kv = prefiller, prefiller.lost_kv
        self._pulls = live.pulls
        self._pooled_s = self._clock()
        self.emitted_before = live.emitted_before
        self._counts.update(np.array([self.row]), np.array([live.emitted]))

    def proved(
        self, message: from_relay.PrefillDone | from_relay.DecodeStarted | from_relay.SessionEnded
    ) -> LegSucceeded | None:
        """Return what a message implies of the engine that the request is on; see `Host.feed`."""
        rank = self._rank
        if rank is None or isinstance(message, from_relay.PrefillDone):
            return None if self._at is None else LegSucceeded(self._at.target)
        if self._kv is None or not self._pulls:
            return LegSucceeded(rank.target)
        return LegSucceeded(rank.target, (self._kv[0].id, rank.id))

    def prefilled(self, event: from_relay.PrefillDone) -> None:
        """Count an event, and note where the request is now."""
        self.heard += 1
        self.given = event.taken
        at = self._at
        self._kv = None if at is None else (at, at.lost_kv)
        self._pulls = event.pulls
        self._at = self._rank = self._remote = None
        self._pooled_s = self._clock()

    def started(self, event: from_relay.DecodeStarted) -> None:
        """Count an event likewise."""
        self.heard += 1
        self.given = event.taken
        self.emitted_before = event.emitted
        if event.emitted != self.emitted_tokens:  # A first binding begins at none.
            self._counts.update(np.array([self.row]), np.array([event.emitted]))
        self._kv = self._remote = None

    def answered(self, event: from_relay.FirstToken) -> None:
        """Count an event likewise."""
        self.heard += 1
        self.given = event.taken

    def lost(self, event: from_relay.Loss) -> bool:
        """Count an event likewise; return whether it crossed a binding."""
        crossed = event.taken < self.given
        self.heard += 1
        self.given = event.taken
        if not isinstance(event, from_relay.DecodeLost):
            self._kv = None
        self._at = self._rank = self._remote = None
        if not isinstance(event, from_relay.PrefillLost):
            self._pooled_s = self._clock()
        return crossed

    def prefilled_by(self, prefiller: "Prefiller | None") -> None:
        """Note who prefills for the rank, which called for it."""
        self._remote = prefiller

    # What was decided.

    def start_prefill(self, prefiller: "Prefiller") -> None:
        """Order the prefill leg, or the whole request if nobody decodes it."""
        self.record.prefill_began(prefiller.name, self._clock())
        self._at = prefiller
        self.given += 1
        self._send(to_relay.StartPrefill(self.theirs, self.heard, prefiller.id))

    def start_decode(self, rank: "Rank") -> None:
        """Order the decode leg."""
        self.record.bound(rank.name, self._clock(), pooled_s=self._pooled_s)
        self._rank = rank
        self.given += 1
        self._send(to_relay.StartDecode(self.theirs, self.heard, rank.id))

    def pooled(self) -> None:
        """Note that it waits for a rank from the start, as the relay knows by itself."""
        self._pooled_s = self._clock()

    def drop_leg(self) -> None:
        """Do nothing: the relay has dropped it, or drops it when it is told of the end."""

    def prefill_again(self) -> None:
        """Say that the prompt is computed anew."""
        self._kv = None
        self._send(to_relay.PrefillAgain(self.theirs))

    def lease_ended(self, *, cheaper: bool) -> None:
        """Say that the KV cache must not be used any more."""
        self._kv = None
        self._send(to_relay.LeaseEnded(self.theirs, cheaper))

    def expire(self, reason: str) -> None:
        """Give the request up: it waited too long."""
        self._send(to_relay.Expire(self.theirs, reason))

    def expect_abort(self) -> None:
        """Say that engines are told to abort it."""
        self._send(to_relay.ExpectAbort(self.theirs))

    def give_up(self, reason: str) -> None:
        """End the request, which somebody else may serve later."""
        self._send(to_relay.GiveUp(self.theirs, reason))

    def crash(self) -> None:
        """End the request, whose handling failed."""
        if not self._crashed:
            self._crashed = True
            self._send(to_relay.Crash(self.theirs))

    def abandon(self) -> None:
        """Do nothing: the relay ends it, or ends itself."""

    # Engines that go.

    def instance_removed(self, target: "Target", *, gently: bool = False) -> None:
        """Have it go on without an instance that it was on."""
        self._send(to_relay.InstanceRemoved(self.theirs, target.role, target.url, gently))

    def engine_lost(self, target: "Target") -> None:
        """Have it leave an engine that does not answer any more."""
        self._send(to_relay.EngineLost(self.theirs, target.role, target.url))

    def drop_lost_kv(self) -> None:
        """Have it prefilled again if it waits in the pool with a KV cache that is lost."""
        if self._kv is not None and self._rank is None and self._kv[0].lost_kv != self._kv[1]:
            self._send(to_relay.DropLostKv(self.theirs))
