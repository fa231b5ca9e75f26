"""One request of a trace, and the error of a trace that cannot be read.

A record has what the engine needs, independent of the file's format: the arrival in nanoseconds and
lengths in tokens. Bounds keep every sum over a trace within 64 bits.
"""

from dataclasses import dataclass
from pathlib import Path

MAX_ARRIVAL_NS = 2**63 - 1
MAX_TOKENS = 2**31 - 1


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
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check types and ranges, so that an invalid record cannot exist.

        Raises:
            TypeError: A field is not an integer, or `hash_ids` not a tuple of integers.
            ValueError: A field is negative or over its bound.
        """
        for name, value, largest in (
            ("arrival_ns", self.arrival_ns, MAX_ARRIVAL_NS),
            ("prompt_tokens", self.prompt_tokens, MAX_TOKENS),
            ("output_tokens", self.output_tokens, MAX_TOKENS),
            ("max_tokens", 0 if self.max_tokens is None else self.max_tokens, MAX_TOKENS),
        ):
            # Not isinstance, for which a bool is an int.
            if type(value) is not int:
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if not 0 <= value <= largest:
                raise ValueError(f"{name} must be in 0..{largest}, not {value}")
        if type(self.hash_ids) is not tuple or any(type(item) is not int for item in self.hash_ids):
            raise TypeError("hash_ids must be a tuple of integers")
