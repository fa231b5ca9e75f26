"""Time limits and retries of the legs to the engines."""

from dataclasses import dataclass, field
from enum import Enum

from balanceroute.proxy.core.setting import choice, integer, named, number, seconds, switch, words
from balanceroute.proxy.live.openai.body import BodyError
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS, Shape

# Requests that cannot be split between the roles, and which engine does all of such a request.
#
# A decode rank computes prompts in the step of all other requests' tokens, and not every decode
# rank can: vllm-ascend frees the weights that this takes (MLAPO, vllm-ascend#11882), and the
# worker dies with all its requests. A prefiller is an engine with everything it takes to decode
# as well.


class Direct(Enum):
    """The role that serves requests that one engine has to do whole."""

    PREFILL = "prefill"
    DECODE = "decode"
    REFUSE = "refuse"


REFUSE_DIRECT = Direct.REFUSE


# Of English text, and of program text fewer. Every process must come to the same result, so the mean of
# the prompts that were counted is of no use here.
_CHARACTERS_PER_TOKEN = 4


def guessed_tokens(shape: "Shape") -> int:
    """Return the prompt tokens of a request that no engine has counted."""
    known = shape.prompt_tokens
    return shape.prompt_characters // _CHARACTERS_PER_TOKEN if known is None else known


def check_direct(shape: "Shape", direct: Direct) -> None:
    """Reject a request that one engine has to do whole, if none is to. Raises BodyError."""
    if direct is not REFUSE_DIRECT:
        return
    why = "one engine would have to do the whole request, which this deployment does not serve"
    if shape.direct == shape.api.value:
        raise BodyError(f"{shape.direct} is not served: {why}")
    raise BodyError(f"{shape.direct} has a value that is not served: {why}", shape.direct)


class FirstTokenFrom(Enum):
    """Whose first token the client gets."""

    PREFILL = "prefill"
    DECODE = "decode"


FROM_DECODE = FirstTokenFrom.DECODE


# Streams that another decode rank continues when theirs fails.


class Resume(Enum):
    """Which streams go on.

    In vLLM a seed begins anew with each request, unless the sampler draws by position. So only the most
    likely tokens (temperature 0) are certain to be those that one engine would have given.
    """

    OFF = "off"
    EXACT = "exact"
    VALID = "valid"


RESUME_OFF = Resume.OFF


# In parts, as `balanceroute serve --help` shows them: no part has slots, so that one class can have all.


@dataclass(frozen=True, kw_only=True)
class LegTimes:
    """How long a leg may take."""

    expired_status: int = integer(
        503, "status of the answer to a request that expired", 400, 599, metavar="STATUS"
    )
    prefill_timeout_s: float = seconds(300.0, "for a prefill's whole answer")
    # Some engines hang silently on a hand-off that cannot be used.
    first_token_timeout_s: float = seconds(
        60.0, "from dispatch to a decode rank to its first token"
    )
    # vLLM's parsers of tool calls hold back an argument until it is whole, some thousands of tokens of it.
    idle_stream_timeout_s: float = seconds(300.0, "between two pieces of a decode rank's answer")
    sse_keep_alive_s: float | None = number(
        None,
        "silence after which the client of a stream gets a comment, also while its request waits",
        1,
        10_000,
        word="off",
        metavar="S",
    )
    answer_timeout_s: float = seconds(
        1800.0, "for a decode rank's whole answer, if it is not streamed"
    )


@dataclass(frozen=True, kw_only=True)
class LegRetries:
    """How often a leg is tried."""

    retry_attempts: int = integer(
        3, "tries of each leg (prefill, decode), the first one too", 1, 100
    )
    retry_backoff_s: float = seconds(0.05, "wait before the first retry; doubles with each one", 0)
    retry_backoff_limit_s: float = seconds(1.0, "longest wait before a retry", 0)


@dataclass(frozen=True, kw_only=True)
class AnswerLimit:
    """The limit of the size of an answer."""

    answer_limit_bytes: int = integer(
        256 << 20, "size of an answer that is not streamed", 1 << 10, 1 << 40
    )


@dataclass(frozen=True, kw_only=True)
class LegRules:
    """How requests go to engines."""

    lease_margin_s: float = seconds(
        5.0, "how long before the end of its lease a KV cache counts as lost", 0
    )
    # What engines compute in one step by default (vLLM's `max_num_batched_tokens`), so that the other
    # requests of a rank, and of those that step with it, wait for one long step at most.
    direct_decode_tokens: int = integer(
        2048,
        "with --direct decode, tokens of the longest prompt that a rank computes for such a request; "
        "longer ones go to prefillers",
        0,
        10**9,
    )
    on_missing_kv: str = choice(
        "recompute",
        "when a prefill answer has no usable KV parameters: serve the request as --direct says, or "
        "count it as a failed try",
        words(("recompute", "fail")),
    )
    pass_priority: bool = switch(
        False,
        "let engines have the `priority` of requests, for --scheduling-policy priority; vLLM's "
        "default policy answers 400 to any but 0",
    )
    count_tokens: str = choice(
        "usage",
        "how the tokens of a stream are counted: by the usage that engines are asked for in every "
        "event (and that clients do not see unless they ask), or an event is one token",
        words(("usage", "events")),
    )
    resume: Resume = choice(
        Resume.OFF,
        "which streams another engine continues when theirs fails, from the token ids that "
        "engines are asked for, or by beginning again without what the client has: those that one "
        "engine would have given (temperature 0, or a seed), or also sampled ones",
        named(Resume),
    )
    first_token: FirstTokenFrom = choice(
        FirstTokenFrom.DECODE,
        "whose first token the client of a stream gets: the prefiller's, at once, or that of the "
        "decode rank, which says it again",
        named(FirstTokenFrom),
    )


@dataclass(frozen=True, kw_only=True)
class LegSettings(LegTimes, LegRetries, AnswerLimit, LegRules):
    """All that legs go by."""

    direct: Direct = Direct.DECODE
    # How long a prefiller keeps a KV cache that no decoder asked for; None for ever. What the
    # engine says of a single request goes first.
    lease_s: float | None = None
    # Whether each request is to say when it comes whether its first token may be the prefiller's.
    asks_early: bool = False
    # Whether the proxy sends prefillers a name of each text, which their KV cache events repeat.
    names_prompts: bool = False
    drop: frozenset[str] = field(init=False)  # Members of clients that no engine gets.

    def __post_init__(self) -> None:
        drop = INTERNAL_FIELDS - {"priority"} if self.pass_priority else INTERNAL_FIELDS
        object.__setattr__(self, "drop", drop)

    @property
    def keeps_answers(self) -> bool:
        """Whether streams may go on elsewhere, or begin with what a prefiller says."""
        return self.resume is not RESUME_OFF or self.first_token is not FROM_DECODE

    def direct_of(self, prompt_tokens: int) -> Direct:
        """Return the role that serves a request that one engine has to do whole."""
        too_long = prompt_tokens > self.direct_decode_tokens
        return Direct.PREFILL if too_long and self.direct is Direct.DECODE else self.direct

    def overdue(self, *, prefill: bool, stream: bool) -> str:
        """Return what to say of a leg that has not begun to answer in time."""
        if prefill:
            return f"the prefill took longer than {self.prefill_timeout_s:g} s"
        if stream:
            return f"no token came within {self.first_token_timeout_s:g} s"
        return f"no answer came within {self.answer_timeout_s:g} s"
