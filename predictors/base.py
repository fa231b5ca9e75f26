"""What drivers report to a predictor, besides asking it: the contract between them.

The core only asks (`balanceroute.proxy.core.prediction.Predictor`); the driver of the core tells the
predictor of every request's begin and end. Nothing that is told lies in the future of the question:
features are what is known of a request before its first token.
"""

from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from balanceroute.proxy.core import prediction
from balanceroute.proxy.core.events import RequestId


class RequestFeatures(Struct, frozen=True):
    """What is known of a request before it decodes.

    Attributes:
        prompt_tokens: Length of its prompt.
        max_tokens: The most tokens that each of its sequences may emit, below 2**31; None if there
            is no bound.
        keys: What recurring requests have in common, as 64-bit hashes, the most specific first: the
            whole request, then ever shorter beginnings of its prompt. Empty if unknown.
        expected_tokens: What the client expects each sequence to emit; None if it does not say.
    """

    prompt_tokens: int
    max_tokens: int | None = None
    keys: tuple[int, ...] = ()
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that ran to its own end: what predictors are trained and judged on.

    Attributes:
        arrival_s: When it came, in seconds of any one clock.
        finished_s: When it ended, of the same clock: only then is its length known.
        features: What was known of it before.
        output_tokens: Tokens that each of its sequences emitted, at least 1.
    """

    arrival_s: float
    finished_s: float
    features: RequestFeatures
    output_tokens: int


class Predictor(prediction.Predictor, Protocol):
    """Predicts how long active requests go on, and learns from those that end."""

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note what is known of a request, before the first question about it.

        Called again when more is known, its true prompt length for example; the latest counts.
        """

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Learn that a request ended by itself after `output_tokens` tokens a sequence."""

    def forget(self, request: RequestId) -> None:
        """Note that a request ended otherwise: how long it would have gone on stays unknown."""
