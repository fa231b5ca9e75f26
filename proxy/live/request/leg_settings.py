"""Time limits and retries of the legs to the engines."""

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.openai.body import BodyError
from balanceroute.proxy.live.openai.continuation import sampling_of, says_again
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS
from balanceroute.proxy.live.openai.stream_event import RepeatedText

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balanceroute.proxy.live.engines.instances import FirstTokenTrust, Prefiller
    from balanceroute.proxy.live.openai.continuation import PrefillFirstToken
    from balanceroute.proxy.live.openai.shape import Shape


# Requests that cannot be split between the roles, and which engine does all of such a request.
#
# A decode rank computes prompts in the step of all other requests' tokens, and not every decode
# rank can: vllm-ascend frees the weights that this takes (MLAPO, vllm-ascend#11882), and the
# worker dies with all its requests. A prefiller is an engine with everything it takes to decode
# as well.


class Direct(Enum):
    """Who serves requests that one engine has to do whole."""

    PREFILL = "prefill"
    DECODE = "decode"
    REFUSE = "refuse"


# Up to Python 3.11 each look at a member of an enumeration is a call.
_REFUSE = Direct.REFUSE
# Of English text, and of program text fewer. Every process must come to the same result, so the mean of
# the prompts that were counted is of no use here.
_CHARACTERS_PER_TOKEN = 4


def guessed_tokens(shape: "Shape") -> int:
    """Return the prompt tokens of a request that no engine has counted."""
    known = shape.prompt_tokens
    return shape.prompt_characters // _CHARACTERS_PER_TOKEN if known is None else known


def check_direct(shape: "Shape", direct: Direct) -> None:
    """Reject a request that one engine has to do whole, if none is to.

    Raises:
        BodyError: None is to.
    """
    if direct is not _REFUSE:
        return
    why = "one engine would have to do the whole request, which this deployment does not serve"
    if shape.direct == shape.api.value:
        raise BodyError(f"{shape.direct} is not served: {why}")
    raise BodyError(f"{shape.direct} has a value that is not served: {why}", shape.direct)


# The first token of a stream, given to the client when the prefill ends, before there is a rank.
#
# The decode leg stays as it is: the rank says the token again, which is left out. For both to
# draw the same token, both legs have one seed. Until the rank has said more than the client has,
# all of it can be repeated, as before the first byte. If it says something else, the answer goes
# on behind the client's token, from ids.
#
# Of a prefiller on probation the client gets nothing: what it says is compared with what the rank
# says.


class FirstTokenFrom(Enum):
    """Whose first token the client gets."""

    PREFILL = "prefill"
    DECODE = "decode"


class EarlyToken:
    """The first token of one request.

    Attributes:
        kept: Members of the client's body that a continuation has.
        members: What the prefill leg is asked for beyond those of both legs.
        min_tokens: How many the prefill leg must not end before.
        said: What the client has; None if it has nothing.
    """

    __slots__ = ("_doubted", "_firsts", "_prefiller", "kept", "members", "min_tokens", "said")

    def __init__(self, kept: "Mapping[str, Any]") -> None:
        sampling = sampling_of(kept)
        self.kept = kept
        # Where the sampling has a place of its own, the answer is ids.
        self.members = {"return_token_ids": True} if sampling is kept else {}
        # An answer may be empty, and then the prefiller has to say so, too.
        self.min_tokens = 1 if sampling.get("min_tokens") else 0
        self.said: PrefillFirstToken | None = None
        self._doubted: PrefillFirstToken | None = None
        self._prefiller = ""
        self._firsts: FirstTokenTrust | None = None

    @property
    def comparison(self) -> "Callable[[bytes], bool] | None":
        """What compares each event of a rank's stream until it is true; None if nothing is to be."""
        if self._doubted is None:
            return None
        return partial(self._compare, self._doubted, RepeatedText(self._doubted.text))

    def give(self, said: "PrefillFirstToken", prefiller: "Prefiller") -> None:
        """Note that the client has what a prefiller said."""
        self.said, self._doubted = said, None
        self._firsts, self._prefiller = prefiller.first_tokens, prefiller.name
        self._firsts.count()

    def doubt(self, said: "PrefillFirstToken", prefiller: "Prefiller") -> None:
        """Note what a prefiller said, for a rank to say it first."""
        self._doubted = said
        self._firsts, self._prefiller = prefiller.first_tokens, prefiller.name

    def take_back(self) -> None:
        """Note that the rank said another one."""
        if self._firsts is not None:
            self._firsts.differ(self._prefiller)

    def _compare(self, said: "PrefillFirstToken", left: RepeatedText, event: bytes) -> bool:
        same = says_again(said, left, event)
        if same is None or self._firsts is None:
            return False
        self._doubted = None  # Another rank is no other comparison.
        self._firsts.count()
        if same:
            self._firsts.agree()
        else:
            self.take_back()
        return True


# Streams that another decode rank continues when theirs fails.


class Resume(Enum):
    """Which streams go on.

    In vLLM a seed begins anew with each request, unless the sampler draws by position. So only the most
    likely tokens (temperature 0) are certain to be those that one engine would have given.
    """

    OFF = "off"
    EXACT = "exact"
    VALID = "valid"


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


# A cap on retries over the whole proxy, so that an outage is not answered with a retry storm.
#
# A fifth of the requests may be tried again, as Envoy's and Linkerd's budgets have it, and ten
# more (as many as Linkerd allows a second) so that the first failures after a quiet time are
# retried: it takes a few to tell who is at fault.


class RetryBudget:
    """Earns a share of a retry with each request.

    Args:
        share: Retries per request.
        reserve: Retries available at the start.
        most: The largest number of retries saved up.
    """

    def __init__(self, *, share: float = 0.2, reserve: float = 10.0, most: float = 100.0) -> None:
        self._share = share
        self._most = most
        self._left = reserve

    def earn(self) -> None:
        """Note one request."""
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Take one retry; return whether there was one."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
