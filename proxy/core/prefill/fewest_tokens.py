"""`fewest-tokens`: the prefiller that holds the fewest KV tokens."""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId, Ticket
from balanceroute.proxy.core.prefill.base import PrefillView
from balanceroute.proxy.core.turns import Turns


class FewestTokens:
    """The candidate that holds the fewest KV tokens; equal ones take turns."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self,
        ticket: Ticket,
        prompt_tokens: int,
        candidates: Sequence[PrefillerId],
        view: PrefillView,
    ) -> PrefillerId:
        """Return the candidate with the fewest tokens."""
        del ticket, prompt_tokens
        held = view.held_tokens
        fewest = min([held[prefiller] for prefiller in candidates])
        return self._turns.take([p for p in candidates if held[p] == fewest])
