"""One request of a trace, and the error of a trace that cannot be read.

A record has what the engine needs, independent of the file's format: the arrival in nanoseconds and
lengths in tokens. Bounds keep every sum over a trace within 64 bits.
"""

from dataclasses import dataclass
from pathlib import Path

MAX_ARRIVAL_NS = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_LEVEL = 2**31 - 1
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e6


class TraceError(ValueError):
    """A trace that cannot be read.

    Attributes:
        line: The line with the error, counted from 1; 0 if the file as a whole has it.
    """

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path = path
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_ns: When the request arrives, in nanoseconds from the start of the trace.
        output_tokens: Length of the answer; 0 marks a request that failed when it was recorded.
        hash_ids: One id per prefix block of the prompt, equal ids for equal prefixes; empty if the
            trace does not record them.
        max_tokens: The limit that the client set; None if it set none, or the trace does not record it.
        tenant: Whose it is; empty if the trace does not say.
        level: Its class of service; lower goes first, and 0 is the usual one.
        deadline_ns: How long after its arrival its first token is due; None for never.
        weight: The share of its tenant.
        session: The conversation that it is a turn of; empty if the trace does not say.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    tenant: str = ""
    level: int = 0
    deadline_ns: int | None = None
    weight: float = 1.0
    session: str = ""

    def __post_init__(self) -> None:
        """Check types and ranges, so that an invalid record cannot exist.

        Raises:
            TypeError: A field has another type than it must.
            ValueError: A field is out of its bounds.
        """
        for name, value, least, largest in (
            ("arrival_ns", self.arrival_ns, 0, MAX_ARRIVAL_NS),
            ("prompt_tokens", self.prompt_tokens, 0, MAX_TOKENS),
            ("output_tokens", self.output_tokens, 0, MAX_TOKENS),
            ("max_tokens", 0 if self.max_tokens is None else self.max_tokens, 0, MAX_TOKENS),
            ("level", self.level, -MAX_LEVEL, MAX_LEVEL),
            ("deadline_ns", 0 if self.deadline_ns is None else self.deadline_ns, 0, MAX_ARRIVAL_NS),
        ):
            # Not isinstance, for which a bool is an int.
            if type(value) is not int:
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if not least <= value <= largest:
                raise ValueError(f"{name} must be in {least}..{largest}, not {value}")
        if type(self.tenant) is not str or type(self.session) is not str:
            raise TypeError("tenant and session must be texts")
        if type(self.weight) is not float:
            raise TypeError("weight must be a float")
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ValueError(f"weight must be in {LEAST_WEIGHT}..{MOST_WEIGHT}, not {self.weight}")
        if type(self.hash_ids) is not tuple or any(type(item) is not int for item in self.hash_ids):
            raise TypeError("hash_ids must be a tuple of integers")
