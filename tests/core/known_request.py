"""What the naive model of the scheduler knows of one request."""

from dataclasses import dataclass, field

from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId


@dataclass(slots=True)
class Known:
    """What the model knows of a live request."""

    number: RequestId
    prompt_tokens: int
    slots: int
    prefill: bool
    decode: bool
    since_ns: int  # It arrived, or came back after it had been answered or served.
    phase: str = "queued"
    emitted_before: int = 0
    prefiller: PrefillerId | None = None  # Whose budget it holds.
    lost_on_prefillers: list[int] = field(default_factory=list)
    pooled_ns: int | None = None  # First time in the pool since it last decoded.
    prefilled_ns: int = 0
    lease_ns: int | None = None
    rank: RankId | None = None
    started: bool = False
    kv_tokens: int = 0
    lost_on_ranks: list[int] = field(default_factory=list)
    answered: bool = False  # Its client has its first token.

    @property
    def floor_tokens(self) -> int:
        """What it holds in decode before it emits anything."""
        return self.prompt_tokens * self.slots

    @property
    def prefiller_tokens(self) -> int:
        """What it holds on a prefiller."""
        return self.prompt_tokens if self.decode else self.floor_tokens
