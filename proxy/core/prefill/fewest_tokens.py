"""`fewest-tokens`: the prefiller that holds the fewest KV tokens."""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId, Ticket
from balanceroute.proxy.core.prefill.base import PrefillView


class FewestTokens:
    """The candidate that holds the fewest KV tokens.

    Equal ones take turns, so that no one of several idle ones gets every request.
    """

    def __init__(self) -> None:
        self._choices = 0
        self._last_choice: dict[PrefillerId, int] = {}

    def choose(
        self,
        ticket: Ticket,
        prompt_tokens: int,
        candidates: Sequence[PrefillerId],
        view: PrefillView,
    ) -> PrefillerId:
        """Return the candidate with the fewest tokens; of equal ones that chosen least recently."""
        del ticket, prompt_tokens
        held = view.held_tokens
        fewest = min([held[prefiller] for prefiller in candidates])
        equals = [prefiller for prefiller in candidates if held[prefiller] == fewest]
        chosen = min(equals, key=lambda prefiller: self._last_choice.get(prefiller, 0))
        self._choices += 1
        self._last_choice[chosen] = self._choices
        return chosen
