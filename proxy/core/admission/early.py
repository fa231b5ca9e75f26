"""`early`: a request that cannot have its first token in time is refused at once.

It would wait, and be prefilled perhaps, to expire in the end. Refused at once it costs nothing, and
its client can go elsewhere. Requests without a deadline, and those that arrive while nothing waits or
runs, are accepted: otherwise a deployment that was slow once would never be measured again.
"""

from balanceroute.proxy.core.admission.base import Admission, Ending, Load, Refusal
from balanceroute.proxy.core.events import Ticket

_UNAVAILABLE = 503
_NS_PER_S = 1_000_000_000
_LONGEST_S = 3600


class EarlyRefusal:
    """Refuses what comes too late.

    Args:
        within: Asked first.
    """

    def __init__(self, within: Admission) -> None:
        self._within = within
        self.follows = within.follows

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Reject a request whose first token is expected after its deadline."""
        refusal = self._within.offer(ticket, load, now_ns)
        expected_ns = load.first_token_ns
        if refusal is not None or ticket.deadline_ns is None or expected_ns is None:
            return refusal
        left_ns = ticket.deadline_ns - now_ns
        if load.idle or expected_ns <= left_ns:
            return None
        reason = (
            f"the first token is expected in {expected_ns / _NS_PER_S:.1f} s, "
            f"and due in {max(0, left_ns) / _NS_PER_S:.1f} s"
        )
        # If nobody comes meanwhile, the queue is by so much shorter then.
        retry_s = min(-(-int(expected_ns - left_ns) // _NS_PER_S), _LONGEST_S)
        return Refusal(_UNAVAILABLE, reason, max(1, retry_s), cause="deadline")

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Pass on."""
        self._within.began(ticket, now_ns)

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Pass on."""
        self._within.ended(ticket, ending, now_ns)
