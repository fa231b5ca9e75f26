"""Which of the prefillers with room takes a request: the interface for scores and prefix affinity.

A prefill choice is one new file here and a line in the registry.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from balanceroute.proxy.core.events import PrefillerId, Ticket


class PrefillView(Protocol):
    """The prefillers as a choice sees them, indexed by prefiller. Read-only."""

    @property
    def held_tokens(self) -> Sequence[int]:
        """KV tokens held."""
        ...

    @property
    def prefills(self) -> Sequence[int]:
        """Running prefills."""
        ...

    @property
    def direct(self) -> Sequence[int]:
        """Sequences of direct requests."""
        ...


class PrefillChoice(Protocol):
    """Chooses the prefiller of a request."""

    def choose(
        self,
        ticket: Ticket,
        prompt_tokens: int,
        candidates: Sequence[PrefillerId],
        view: PrefillView,
    ) -> PrefillerId:
        """Return one of the candidates.

        Args:
            ticket: The ticket of the request.
            prompt_tokens: Tokens that it is charged; more than in the ticket if it was recomputed.
            candidates: The open prefillers with room for it, ascending; at least one.
            view: All prefillers.
        """
        ...


MakePrefillChoice = Callable[[], PrefillChoice]
