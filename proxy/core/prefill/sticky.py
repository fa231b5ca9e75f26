"""`sticky`: a conversation stays on one prefiller, by rendezvous hashing, whatever its load.

What other routers do with a session's id. Without one the second block of the prompt stands for the
conversation: the first one is often a system prompt that all share. Of several candidates the one with
the highest hash of conversation and prefiller takes it, so that a prefiller more or less moves only
its own conversations.

Source: https://github.com/vllm-project/router, src/policies/rendezvous_hash.rs at 292889ebe341.
"""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView

_MASK = (1 << 64) - 1


class Sticky:
    """The candidate with the highest hash; without session and blocks, of the request's id."""

    observer = None

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return the conversation's prefiller."""
        del view
        ticket = request.ticket
        blocks = ticket.blocks or (request.request,)
        conversation = ticket.session or blocks[min(1, len(blocks) - 1)]
        return max(candidates, key=lambda prefiller: _mix(conversation, prefiller))


def _mix(conversation: int, prefiller: int) -> int:
    """Return 64 bits that depend on both evenly (the finaliser of SplitMix64)."""
    bits = (conversation + (prefiller + 1) * 0x9E3779B97F4A7C15) & _MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
    return bits ^ bits >> 31
