"""What happened to one replayed request."""

from dataclasses import dataclass

from balanceroute.proxy.replay.faults import Fault
from balanceroute.proxy.replay.workload import PlannedRequest


@dataclass(slots=True)
class Sample:
    """What happened to one request; times are of the replay's clock.

    Attributes:
        first_ns: When its first token arrived.
        second_ns: When its second token arrived.
        last_ns: When its latest token arrived.
        end_ns: When it ended; None while it runs.
        events: Token events so far.
        window_events: Those inside the window.
        prompt_tokens: The engine's count, if reported.
        output_tokens: The engine's count if reported, else the events; 0 until it has finished.
        fault: Why it failed; None if it did not.
        retry_after: The header of a refusal; None without one.
        cancelled: Whether it was cancelled when the replay was interrupted.
    """

    request: PlannedRequest
    due_ns: int
    sent_ns: int
    first_ns: int = 0
    second_ns: int = 0
    last_ns: int = 0
    end_ns: int | None = None
    events: int = 0
    window_events: int = 0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    fault: Fault | None = None
    retry_after: str | None = None
    cancelled: bool = False

    @property
    def finished(self) -> bool:
        """Whether the request got its whole answer."""
        return self.end_ns is not None and self.fault is None and not self.cancelled

    def tokens_of(self, events: int) -> float:
        """Return how many tokens some of the request's events stand for."""
        return (
            events * self.output_tokens / self.events if self.finished and self.events else events
        )

    @property
    def ttft_ns(self) -> int | None:
        """Return the time to the first token; None before it arrived."""
        return self.first_ns - self.sent_ns if self.events else None

    @property
    def ttst_ns(self) -> int | None:
        """Return the time to the second token; None before it arrived."""
        return self.second_ns - self.sent_ns if self.events > 1 else None

    @property
    def e2e_ns(self) -> int | None:
        """Return the time from sending to the end; None unless the request finished."""
        return self.end_ns - self.sent_ns if self.finished and self.end_ns is not None else None

    @property
    def tpot_ns(self) -> float | None:
        """Return the mean time between tokens; None for fewer than two of a finished request."""
        if not self.finished or not self.events or self.output_tokens < 2:
            return None
        return (self.last_ns - self.first_ns) / (self.output_tokens - 1)
