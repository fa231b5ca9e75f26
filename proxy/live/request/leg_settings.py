"""Time limits and retries of the legs to the engines."""

from dataclasses import dataclass, field

from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS
from balanceroute.proxy.live.request.direct import Direct
from balanceroute.proxy.live.request.early_token import FirstTokenFrom
from balanceroute.proxy.live.request.resume import Resume


@dataclass(frozen=True, slots=True)
class LegSettings:
    """How long a leg may take, and how often it is tried. Times in seconds.

    Attributes:
        prefill_timeout_s: For the whole prefill leg.
        first_token_timeout_s: From the decode leg's start to its first event. Some engines hang
            silently on a hand-off that cannot be used.
        idle_stream_timeout_s: Between two pieces of a stream that has begun. vLLM's parsers of tool calls hold
            back an argument until it is whole, some thousands of tokens of it.
        answer_timeout_s: For an answer that is not streamed.
        retry_attempts: Of each leg, the first included.
        retry_backoff_s: Before the second attempt; it doubles from one to the next.
        retry_backoff_limit_s: The longest.
        answer_limit_bytes: The largest answer that is taken as a whole.
        direct: Who serves requests that one engine has to do whole.
        direct_decode_tokens: Of the longest prompt that a rank computes for such a request.
        on_missing_kv: "recompute" if a request whose prefill left no usable KV cache is served like
            these; else, and if these are refused, it is prefilled again elsewhere.
        count_tokens: "usage" if the tokens of a stream are counted by the engine's own word, which is
            asked for in every event; else an event counts as one.
        lease_margin_s: How long before the end of its lease a KV cache counts as lost.
        pass_priority: Whether engines get the priority that a client gives its request.
        resume: Which streams go on at another rank when theirs fails.
        first_token: Whose first token the client of a stream gets.
        asks_early: Whether each request is to say when it comes whether its first token may be the
            prefiller's.
        names_prompts: Whether prefillers are told a name of each text, as their KV cache events repeat it.
        sse_keep_alive_s: Silence towards the client of a stream after which it gets a sign of life; None
            for ever.
        expired_status: Of the answer to a request that waited longer than it may.
        drop: Members of clients that no engine gets.
    """

    prefill_timeout_s: float
    first_token_timeout_s: float
    idle_stream_timeout_s: float
    answer_timeout_s: float
    retry_attempts: int
    retry_backoff_s: float
    retry_backoff_limit_s: float
    answer_limit_bytes: int
    direct: Direct
    direct_decode_tokens: int
    on_missing_kv: str
    count_tokens: str
    lease_margin_s: float
    pass_priority: bool
    resume: Resume = Resume.OFF
    first_token: FirstTokenFrom = FirstTokenFrom.DECODE
    asks_early: bool = False
    names_prompts: bool = False
    sse_keep_alive_s: float | None = None
    expired_status: int = 503
    drop: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        drop = INTERNAL_FIELDS - {"priority"} if self.pass_priority else INTERNAL_FIELDS
        object.__setattr__(self, "drop", drop)

    def direct_of(self, prompt_tokens: int) -> Direct:
        """Return who serves a request that one engine has to do whole."""
        too_long = prompt_tokens > self.direct_decode_tokens
        return Direct.PREFILL if too_long and self.direct is Direct.DECODE else self.direct

    def overdue(self, *, prefill: bool, stream: bool) -> str:
        """Return what to say of a leg that has not begun to answer in time."""
        if prefill:
            return f"the prefill took longer than {self.prefill_timeout_s:g} s"
        if stream:
            return f"no token came within {self.first_token_timeout_s:g} s"
        return f"no answer came within {self.answer_timeout_s:g} s"
