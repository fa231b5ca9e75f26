"""Who is let in at all: the seam for overload control.

A driver asks before it feeds `RequestArrived`, so that a rejected request never exists for the
scheduler. What waits is bounded here and not in the scheduler, because only the driver can say no.
An admission rule is one new file here and a line in the registry.
"""

from dataclasses import dataclass
from typing import Protocol

from balanceroute.proxy.core.events import Ticket


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in: what its client is answered.

    Attributes:
        status: Of the HTTP answer.
        reason: In words.
        retry_after_s: In how many seconds the client may try again.
    """

    status: int
    reason: str
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the deployment is.

    Attributes:
        waiting: `Scheduler.waiting`, the requests that nobody answers yet.
    """

    waiting: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request that was let in ended.

    Attributes:
        served: Whether it was answered in full.
        first_token_ns: Time from its arrival to its first token; None if there was none.
        output_tokens: Tokens of its answer.
    """

    served: bool
    first_token_ns: int | None
    output_tokens: int


class Admission(Protocol):
    """Decides whether one more request is let in."""

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Return why a request that comes now is rejected, or None: then it is let in.

        Args:
            ticket: The request.
            load: Without it.
            now_ns: The driver's clock.
        """
        ...

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Note how a request ended that was let in; called once for each."""
        ...
