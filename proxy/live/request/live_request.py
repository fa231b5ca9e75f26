"""A request that is served, as those see it who decide about it.

A `Session` is one. Where relays are processes of their own, what stands for a session of a relay is
another.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from balanceroute.proxy.core.events import RequestId, Ticket
    from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Target
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.telemetry.record import RequestRecord


class LiveRequest(Protocol):
    """One request. What it is told is said at `Session`.

    Attributes:
        record: What is known of it; complete when it has ended.
        offset: The step clock's.
    """

    number: "RequestId"
    ticket: "Ticket"
    shape: "Shape"
    record: "RequestRecord"
    offset: int

    @property
    def rounds(self) -> int | None:
        """Tokens that each sequence has emitted on this binding; None if it is not streamed."""

    @property
    def emitted_tokens(self) -> int:
        """Tokens emitted so far, as far as a stream tells."""

    @property
    def pair(self) -> "tuple[Prefiller, Rank] | None":
        """Who is to pull its KV cache from whom; None unless a decode leg has yet to begin so."""

    @property
    def targets(self) -> "Collection[Target]":
        """The instances that work for this request, or hold its KV cache."""

    def is_on(self, target: "Target") -> bool:
        """Return whether an instance is one of these."""

    def check_deadline(self, now_s: float) -> None:
        """Act if the leg in flight takes too long."""

    # What was decided.

    def start_prefill(self, prefiller: "Prefiller") -> None:
        """Send the prefill leg, or the whole request if nobody decodes it."""

    def start_decode(self, rank: "Rank") -> None:
        """Send the decode leg."""

    def pooled(self) -> None:
        """Note that the request waits for a rank from now on."""

    def drop_leg(self) -> None:
        """Stop the leg in flight, if any; nothing more comes of it."""

    def prefill_again(self) -> None:
        """Note that the scheduler has the prompt computed anew, if a prefiller does that at all."""

    def lease_ended(self, *, cheaper: bool) -> None:
        """Note that the KV cache must not be used any more; `cheaper` as in `ReleasePrefill`."""

    def expire(self, reason: str) -> None:
        """Give the request up: it waited too long. The scheduler knows."""

    def expect_abort(self) -> None:
        """Note that engines are told to abort it: what they answer then is the answer."""

    def give_up(self, reason: str) -> None:
        """End the request, which somebody else may serve later."""

    def crash(self) -> None:
        """End the request, whose handling failed, its end perhaps. The scheduler knows."""

    def abandon(self) -> None:
        """Let go of the request, whatever it takes: `crash` did not end it."""

    # Engines that go.

    def instance_removed(self, target: "Target", *, gently: bool = False) -> None:
        """Go on without an instance that this request was on, unless its answer came from there."""

    def engine_lost(self, target: "Target") -> None:
        """Leave an engine that does not answer any more, unless its answer has begun."""

    def drop_lost_kv(self) -> None:
        """Prefill again if it waits in the pool with a KV cache that is lost."""
