"""What the scheduler process tells a relay; docs/relay_protocol.md has the rules.

`number` is always the relay's own number of a request. `heard` is the number of core events of that
request (`from_relay.CoreEvent`) that the scheduler process had taken when it sent the message.
"""

from msgspec import Struct

from balanceroute.proxy.core.admission import Allowance
from balanceroute.proxy.core.events import PrefillerId, RankId
from balanceroute.proxy.live.engines.instances import Role, Status
from balanceroute.proxy.live.request.suspects import Suspicion


class Welcome(Struct, frozen=True, array_like=True, tag=101):
    """The answer to a `Hello`; engines, models and readiness follow in the same frame.

    Attributes:
        version: `frames.VERSION`.
        scheduler: Names this scheduler process; another one after a restart.
        relays: How many relays there are, among which limits of a whole proxy are divided.
        uses_keys: Whether arrivals are to have keys.
        uses_blocks: Whether they are to have the hashes of their blocks.
        token_block: Tokens of a block where prompts are token ids; 0 for blocks of text alone.
        suspects_key: Of the hashes that name prompts; see `Suspects`.
    """

    version: int
    scheduler: str
    relays: int
    uses_keys: bool
    uses_blocks: bool = False
    token_block: int = 0
    suspects_key: bytes = b""


class Unwelcome(Struct, frozen=True, array_like=True, tag=102):
    """The answer to a `Hello` that cannot be served; the connection is closed."""

    reason: str


# The deployment. Each replaces what was told before of the same.


class PrefillerState(Struct, frozen=True, array_like=True, tag=103):
    """A prefiller, new or changed. Ids count from 0 in the order in which they are told.

    Attributes:
        url: Its base URL, which names it in reports.
        identity: The `engine_id` and `bootstrap_address` of its bootstrap server; None if it has none
            or is not known yet.
        losses: How often all KV caches that it had handed out were lost.
    """

    id: PrefillerId
    name: str
    url: str
    status: Status
    identity: tuple[str, str] | None
    losses: int


class RankState(Struct, frozen=True, array_like=True, tag=104):
    """A decode rank, new or changed.

    Attributes:
        url: The base URL of its server, which names that in reports.
        header: Value of X-data-parallel-rank; None if the rank has a URL of its own.
        still: Whether it makes no tokens while others do, so that requests leave it.
    """

    id: RankId
    name: str
    url: str
    status: Status
    header: bytes | None
    still: bool = False


class Model(Struct, frozen=True, array_like=True):
    """One model of one engine; see `ServedModel`. `card` is JSON."""

    name: str
    parent: str | None
    max_model_len: int | None
    card: bytes


class Models(Struct, frozen=True, array_like=True, tag=105):
    """What is known of the models of each engine that is up, by role and URL."""

    known: tuple[tuple[Role, str, tuple[Model, ...]], ...]


class Readiness(Struct, frozen=True, array_like=True, tag=106):
    """Whether a request would be taken now, and decided about as it should be."""

    ready: bool


# Answers to `Arrival`.


class Accepted(Struct, frozen=True, array_like=True, tag=107):
    """A request was accepted.

    Attributes:
        row: Names it in `Progress`, until its `SessionEnded`; then another request may have it.
        engine_id: What it is called at the engines.
        prompt_estimate: Prompt tokens as the scheduler takes them to be.
        local_prefill: Whether a rank computes the prompt, so that the request is in the pool.
        allowances: What is left of the rates of the tenant.
    """

    number: int
    row: int
    engine_id: str
    prompt_estimate: int
    local_prefill: bool = False
    allowances: dict[str, Allowance] = {}


class Refused(Struct, frozen=True, array_like=True, tag=108):
    """A request was refused, and does not exist for the scheduler; see `Accepted`."""

    number: int
    status: int
    reason: str
    retry_after_s: int | None
    cause: str
    allowances: dict[str, Allowance] = {}


# Orders for one request; see the methods of `Session` of the same names.


class StartPrefill(Struct, frozen=True, array_like=True, tag=109):
    """Send the prefill leg, or the whole request if nobody decodes it. A binding."""

    number: int
    heard: int
    prefiller: PrefillerId


class StartDecode(Struct, frozen=True, array_like=True, tag=110):
    """Send the decode leg. A binding."""

    number: int
    heard: int
    rank: RankId


class LeaseEnded(Struct, frozen=True, array_like=True, tag=111):
    """The KV cache must not be used any more: the prompt will be computed anew."""

    number: int
    cheaper: bool


class PrefillAgain(Struct, frozen=True, array_like=True, tag=112):
    """The prompt will be computed anew, though the relay expects its KV cache to be used."""

    number: int


class Expire(Struct, frozen=True, array_like=True, tag=113):
    """The request waited too long. It has ended for the scheduler: no event is to follow."""

    number: int
    reason: str


class GiveUp(Struct, frozen=True, array_like=True, tag=114):
    """End the request with a 503, and send `Ended`."""

    number: int
    reason: str


class Crash(Struct, frozen=True, array_like=True, tag=115):
    """End the request with a 500. It has ended for the scheduler: no event is to follow."""

    number: int


# Answers to questions.


class RetryAnswered(Struct, frozen=True, array_like=True, tag=116):
    """The answer to `AskRetry`."""

    question: int
    allowed: bool


class PrefillerChosen(Struct, frozen=True, array_like=True, tag=117):
    """The answer to `AskPrefiller`; None if nobody can. Otherwise a `RemotePrefillEnded` is due."""

    question: int
    prefiller: PrefillerId | None


class Page(Struct, frozen=True, array_like=True, tag=118):
    """The answer to `AskPage`."""

    question: int
    body: bytes


# Engines that go. To each request that the scheduler process knows to be on one.


class EngineLost(Struct, frozen=True, array_like=True, tag=119):
    """An engine does not answer; see `Session.engine_lost`."""

    number: int
    role: Role
    url: str


class DropLostKv(Struct, frozen=True, array_like=True, tag=120):
    """The KV cache with which the request waits is lost, as `PrefillerState.losses` tells."""

    number: int


class InstanceRemoved(Struct, frozen=True, array_like=True, tag=121):
    """An engine was removed; see `Session.instance_removed`. Nothing if the request is not on it."""

    number: int
    role: Role
    url: str
    gently: bool = False


class Drain(Struct, frozen=True, array_like=True, tag=122):
    """Take nothing new, and send `Drained` when every request is over."""


class AloneAnswered(Struct, frozen=True, array_like=True, tag=123):
    """The answer to `AskAlone`: as of `Refused`, or status 0 if it is let in."""

    question: int
    status: int = 0
    reason: str = ""
    retry_after_s: int | None = None
    cause: str = ""
    allowances: dict[str, Allowance] = {}


class LogLevel(Struct, frozen=True, array_like=True, tag=124):
    """How much to log: the least level, as an administrator ordered or as it was set; empty for none."""

    level: str


class ExpectAbort(Struct, frozen=True, array_like=True, tag=125):
    """Engines are told to abort the request; see `Session.expect_abort`."""

    number: int


class SuspectPrompts(Struct, frozen=True, array_like=True, tag=126):
    """The prompts under which engines have died, all of them; see `Suspects`."""

    known: tuple[Suspicion, ...]


ToRelay = (
    Welcome
    | Unwelcome
    | PrefillerState
    | RankState
    | Models
    | Readiness
    | Accepted
    | Refused
    | StartPrefill
    | StartDecode
    | LeaseEnded
    | PrefillAgain
    | Expire
    | GiveUp
    | Crash
    | RetryAnswered
    | PrefillerChosen
    | Page
    | EngineLost
    | DropLostKv
    | InstanceRemoved
    | Drain
    | AloneAnswered
    | LogLevel
    | ExpectAbort
    | SuspectPrompts
)
