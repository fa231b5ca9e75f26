"""Which of the prefillers with room takes a request: the seam for scores and prefix affinity.

A prefill choice is one new file here and a line in the registry.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from balanceroute.proxy.core.events import PrefillerId, Ticket


class PrefillView(Protocol):
    """The prefillers as a choice sees them, by prefiller. Not to be written to."""

    @property
    def held_tokens(self) -> Sequence[int]:
        """KV tokens held."""
        ...

    @property
    def prefills(self) -> Sequence[int]:
        """Probes that run."""
        ...

    @property
    def direct(self) -> Sequence[int]:
        """Sequences of the requests that it answers whole."""
        ...


class PrefillChoice(Protocol):
    """Chooses the prefiller of a prefill."""

    def choose(
        self,
        ticket: Ticket,
        prompt_tokens: int,
        candidates: Sequence[PrefillerId],
        view: PrefillView,
    ) -> PrefillerId:
        """Return one of the candidates.

        Args:
            ticket: Of the request that is to be prefilled.
            prompt_tokens: What it will be charged; more than the ticket says if it was recomputed.
            candidates: The open prefillers with room for it, ascending; at least one.
            view: All prefillers.
        """
        ...


MakePrefillChoice = Callable[[], PrefillChoice]
