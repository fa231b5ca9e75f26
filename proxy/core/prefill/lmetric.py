"""`lmetric`: LMetric's product of new prefill tokens and batch size.

The tokens that a prefiller would have to compute for the request, times the requests that it then
works on. The product has no unit and no parameter.

Source: https://arxiv.org/abs/2603.15202.
"""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView, Turns
from balanceroute.proxy.core.prefill.least_conn import under_way
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory


class LMetric:
    """The candidate with the lowest product; equal ones take turns.

    Args:
        index_blocks: Blocks that are remembered of each prefiller.
    """

    observer = None

    def __init__(self, index_blocks: int) -> None:
        self._memory = PrefixMemory(index_blocks)
        self._turns = Turns()

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return the candidate with the lowest product."""
        expected = self._memory.expect(request, candidates)
        chosen = self._turns.least(
            candidates,
            lambda one: (request.tokens - expected[one].cached_tokens) * (under_way(view, one) + 1),
        )
        self._memory.add(request, chosen)
        return chosen
