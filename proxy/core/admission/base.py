"""Which requests are accepted at all: the interface for overload control.

A driver asks before it feeds `RequestArrived`, so that a rejected request never exists for the
scheduler. The number of waiting requests is bounded here and not in the scheduler, because only the
driver can reject one. An admission rule is one new file here and a line in the registry.
"""

from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from balanceroute.proxy.core.events import Ticket


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is rejected, as its client is answered.

    Attributes:
        status: Of the answer.
        reason: For the client.
        retry_after_s: When to come again; None for never, as it is.
        cause: The reason in a word, of which there are few.
    """

    status: int
    reason: str
    retry_after_s: int | None
    cause: str = "overload"


class Load(Struct, frozen=True):
    """How busy the deployment is.

    Attributes:
        waiting: `Scheduler.waiting`, the requests that no engine answers yet.
        first_token_ns: The expected time to first token of the request that arrives; None if it is
            not known or not measured.
        idle: Whether nothing waits or runs.
    """

    waiting: int
    first_token_ns: float | None = None
    idle: bool = False


class Ending(Struct, frozen=True):
    """How an accepted request ended.

    Attributes:
        served: Whether it was answered in full.
        first_token_ns: Time from its arrival to its first token; None if there was none.
        output_tokens: Tokens that were answered.
        prompt_tokens: Of its prompt, as an engine counted them; 0 if none did.
        began: Whether an engine had begun it.
    """

    served: bool
    first_token_ns: int | None
    output_tokens: int
    prompt_tokens: int = 0
    began: bool = True


class Admission(Protocol):
    """Decides whether a request is accepted."""

    @property
    def follows(self) -> bool:
        """Whether it learns from what is told of accepted requests; if not, nobody need tell."""
        ...

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Return why a request that arrives now is rejected, or None to accept it."""
        ...

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Note that an accepted request was given to an engine; called once at most for each."""
        ...

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Note how an accepted request ended; called once for each."""
        ...
