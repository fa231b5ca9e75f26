"""What a relay tells the scheduler process; docs/relay_protocol.md has the rules.

`number` is always the relay's own number of a request. `taken` is the number of bindings of that
request (`StartPrefill`, `StartDecode`) that the relay had acted on when it sent the message. Times are
nanoseconds of the machine's monotonic clock, which its processes share.
"""

from typing import Literal

from msgspec import Struct

from balanceroute.proxy.core.events import PrefillerId, RankId
from balanceroute.proxy.core.rank_progress import Sighting
from balanceroute.proxy.live.connectors import MissingKv
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.openai.prompt_blocks import PromptBlocks
from balanceroute.proxy.live.openai.shape import Shape
from balanceroute.proxy.live.request.suspects import Suspicion
from balanceroute.proxy.live.telemetry.record import RequestRecord


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """The first message of a connection.

    Attributes:
        version: `frames.VERSION`.
        relay: The relay's place among the relays, from 0; the same after a restart.
        settings: The digest of the settings that it runs with.
        suspects_key: As an earlier scheduler process told it; empty for none.
        suspects: Likewise, so that a new one knows them.
    """

    version: int
    relay: int
    settings: str
    suspects_key: bytes = b""
    suspects: tuple[Suspicion, ...] = ()


class Arrival(Struct, frozen=True, array_like=True, tag=2):
    """A request arrived, and is to be accepted or refused.

    Attributes:
        number: Above all earlier ones of this relay.
        shape: What routing needs to know; its model says which engines are eligible.
        expected_tokens: What the client expects one sequence to emit; None if it does not say.
        level: Its class of service; lower goes first.
        deadline_ns: When its first token is due; None for never.
        tenant: The client's identity; empty if tenants are not told apart.
        keys: See `prompt_keys`; empty unless `Welcome.uses_keys`.
        record: As far as it is known.
        weight: Its share among requests of the same level.
        blocks: See `prompt_blocks`; empty unless `Welcome.uses_blocks`.
        session: Hash of the name of its conversation; 0 for none.
        early_token: Whether its client may get its first token when its prefill ends.
    """

    number: int
    shape: Shape
    expected_tokens: int | None
    level: int
    deadline_ns: int | None
    tenant: str
    keys: tuple[int, ...]
    record: RequestRecord
    weight: float = 1.0
    blocks: PromptBlocks = PromptBlocks()
    session: int = 0
    early_token: bool = False


class Live(Struct, frozen=True, array_like=True, tag=3):
    """A request that goes on under a new scheduler process; see `adoption.py`.

    Attributes:
        arrival: As it was sent when the request came; its record as it is now.
        engine_id: What the engines know it by.
        phase: "queued", "prefilling" (also while a prefiller does all of it), "pooled", "admitted" to
            a rank whose stream has not begun, or "decoding".
        prompt_tokens: Of its next leg, as far as they are counted; else the estimate.
        emitted: Tokens that the client has, of all sequences.
        emitted_before: Those of earlier bindings.
        decode: Whether a rank decodes it, or else a prefiller does all of it.
        prefiller: Who prefills, holds the KV cache, does the whole request, or had the KV cache that
            the rank pulled; None if nobody.
        since_ns: When that prefill began, or was done if the phase is "pooled" or "admitted".
        lease_expires_ns: When its KV cache may be gone; None for never.
        pulls: Whether a rank has yet to pull a KV cache.
        rank: Who decodes; None if nobody.
        waiting_since_ns: When it arrived, or was last queued again after its client had a token.
        pooled_ns: When it first waited for a rank since then; None if it has not.
        served: Whether a rank has served it before.
        lapses: KV caches that it lost since then while it waited for a rank.
        lost_on_prefillers: Prefillers that lost it, the latest last, since its last prefill.
        lost_on_ranks: Ranks that lost it, the latest last, since it last began to decode.
        answered: Whether its client has its first token.
    """

    arrival: Arrival
    engine_id: str
    phase: Literal["queued", "prefilling", "pooled", "admitted", "decoding"]
    prompt_tokens: int
    emitted: int
    emitted_before: int
    decode: bool
    prefiller: PrefillerId | None
    since_ns: int
    lease_expires_ns: int | None
    pulls: bool
    rank: RankId | None
    waiting_since_ns: int
    pooled_ns: int | None
    served: bool
    lapses: int
    lost_on_prefillers: tuple[PrefillerId, ...]
    lost_on_ranks: tuple[RankId, ...]
    answered: bool = False


# Events of the core. Each counts for `heard` of what the scheduler process answers.


class PrefillDone(Struct, frozen=True, array_like=True, tag=4):
    """See `events.PrefillDone`. The prefiller answered.

    Attributes:
        pulls: Whether a rank is to pull a KV cache.
        emitted: Tokens of earlier bindings, of all sequences. If there are none, the prompt is
            counted by this.
    """

    number: int
    taken: int
    prompt_tokens: int
    lease_expires_ns: int | None
    pulls: bool
    emitted: int


class PrefillLost(Struct, frozen=True, array_like=True, tag=5):
    """See `events.PrefillLost`."""

    number: int
    taken: int
    elsewhere: bool
    decode: bool
    same_rank: bool


class DecodeLost(Struct, frozen=True, array_like=True, tag=6):
    """See `events.DecodeLost`."""

    number: int
    taken: int


class DecodeStarted(Struct, frozen=True, array_like=True, tag=7):
    """See `events.DecodeStarted`; `emitted` are the tokens of earlier bindings, of all sequences.

    The rank answered, and has pulled the KV cache if there was one.
    """

    number: int
    taken: int
    emitted: int


class Recomputed(Struct, frozen=True, array_like=True, tag=8):
    """See `events.RequestRecomputed`."""

    number: int
    taken: int
    elsewhere: bool
    anew: bool = False


class FirstToken(Struct, frozen=True, array_like=True, tag=9):
    """See `events.FirstToken`."""

    number: int
    taken: int


# Reports; see `request/reports.py`.


class LegSucceeded(Struct, frozen=True, array_like=True, tag=10):
    """An engine answered, as no core event or end says; see `reports.LegSucceeded`."""

    role: Role
    url: str
    pull: tuple[PrefillerId, RankId] | None = None


class LegFailed(Struct, frozen=True, array_like=True, tag=11):
    """A leg failed through its engine's fault."""

    role: Role
    url: str
    fault: Fault
    reason: str


class PullFailed(Struct, frozen=True, array_like=True, tag=13):
    """A rank failed where it was to pull a KV cache."""

    number: int
    prefiller: PrefillerId
    rank: RankId
    fault: Fault
    reason: str


class EngineSeen(Struct, frozen=True, array_like=True, tag=14):
    """A prefill answer named the engine that runs behind a prefiller's address; told once of each."""

    prefiller: PrefillerId
    engine_id: str


class KvMissing(Struct, frozen=True, array_like=True, tag=32):
    """A prefiller left no KV cache that a rank could pull; see `reports.KvMissing`."""

    prefiller: PrefillerId
    kind: MissingKv
    reason: str


class PromptCounted(Struct, frozen=True, array_like=True, tag=15):
    """An engine counted the tokens of a prompt, as no `PrefillDone` says."""

    number: int
    prompt_tokens: int


class KvAbandoned(Struct, frozen=True, array_like=True, tag=16):
    """No rank will pull a KV cache."""

    how: Literal["lost", "lapsed", "cheaper"]


class RemotePrefillEnded(Struct, frozen=True, array_like=True, tag=17):
    """A prefiller that `PrefillerChosen` named is done, whatever came of it."""

    prefiller: PrefillerId


class SessionEnded(Struct, frozen=True, array_like=True, tag=18):
    """A request is over, and this is its record; nothing more follows of it.

    Attributes:
        how: What the scheduler is to know, see `events.RequestFinished`, `RequestFailed` and
            `RequestCancelled`; empty if it knows, or never accepted it.
        answered: Whether the engine that the request was on answered, which no `DecodeStarted` said;
            a rank has then pulled the KV cache if there was one.
    """

    number: int
    record: RequestRecord
    how: Literal["", "finished", "failed", "cancelled"] = ""
    answered: bool = False


# Questions. Each has a number of its own, and one answer.


class AskRetry(Struct, frozen=True, array_like=True, tag=19):
    """May a leg be sent once more? See `Host.ask_retry`; the answer is a `RetryAnswered`."""

    question: int
    leg: str
    fault: Fault
    pulled_from: PrefillerId | None


class AskPrefiller(Struct, frozen=True, array_like=True, tag=20):
    """Who takes a prefill that a decode rank called for? The answer is a `PrefillerChosen`."""

    question: int
    number: int
    other_than: PrefillerId | None


class AskPage(Struct, frozen=True, array_like=True, tag=21):
    """What is on a page that tells of all processes? The answer is a `Page`."""

    question: int
    path: Literal["/metrics", "/load"]


# What is counted by relays and told by the scheduler process.


class Progress(Struct, frozen=True, array_like=True, tag=22):
    """How far streams are; only those that have moved since the last message, each once.

    Attributes:
        rows: The `Accepted.row` of each, u32 little-endian, packed.
        emitted: Tokens of all its sequences and bindings, u32 little-endian, packed likewise.
    """

    rows: bytes
    emitted: bytes


class Gaps(Struct, frozen=True, array_like=True, tag=23):
    """Gaps between two pieces of a stream since the last message.

    Attributes:
        counts: By bucket of `TOKEN_GAP_BOUNDS_S`, not cumulated, the last without a bound.
        total_s: Their sum in seconds.
        refused: Negative ones and such.
    """

    counts: tuple[int, ...]
    total_s: float
    refused: int


class Recorded(Struct, frozen=True, array_like=True, tag=24):
    """A request ended that no `Arrival` told of, or whose `Arrival` was refused.

    Attributes:
        what: What is to be done: count it as "refused", or as "passed_through" to one engine, or write its "line" in the request log.
    """

    record: RequestRecord
    what: Literal["refused", "passed_through", "line"]


class LegRetried(Struct, frozen=True, array_like=True, tag=25):
    """A leg was sent again that takes nothing from the retry budget of generation."""

    leg: str
    fault: Fault


class Failure(Struct, frozen=True, array_like=True, tag=26):
    """The relay's own handling failed, as it has logged; see `DecisionFailures.report`."""

    what: str


class Occupancy(Struct, frozen=True, array_like=True, tag=27):
    """What a relay holds now, and sums since its start; sent once a second.

    Attributes:
        passing: Requests that are passed through, the waiting ones included.
        lag_s: The latest that a timer was since the last message, in seconds.
        pumped_streams: Times a stream was handed to the native library.
        pumped_events: Events that it moved.
    """

    client_connections: int
    rejected_connections: dict[str, int]
    evicted_connections: int
    body_bytes: int
    rejected_bodies: int
    engine_connections: int
    passing: int
    lag_s: float
    pumped_streams: int = 0
    pumped_events: int = 0


class Drained(Struct, frozen=True, array_like=True, tag=28):
    """Every request of a relay that was told to drain is over."""


class Resumed(Struct, frozen=True, array_like=True, tag=29):
    """A relay has told of every request that goes on; what follows is new."""


class AskAlone(Struct, frozen=True, array_like=True, tag=30):
    """Whether a tenant's limits let a request in that one engine answers alone.

    Its end is told as a `Recorded` that was passed through. Without tenants nobody asks.
    """

    question: int
    tenant: str


class EngineDied(Struct, frozen=True, array_like=True, tag=31):
    """An engine died while it worked on a prompt; see `suspects.EngineDied`."""

    fingerprint: bytes
    request_id: str
    role: Role
    url: str
    sent_s: float
    died_s: float
    said: bool


class Looks(Struct, frozen=True, array_like=True, tag=33):
    """What a relay saw of the ranks by its streams; sent a few times a second while it has any.

    Attributes:
        elapsed_s: Since the last look; 0 if the relay stood still in between.
        sightings: Of the ranks of which it has a stream.
    """

    elapsed_s: float
    sightings: tuple[Sighting, ...]


CoreEvent = PrefillDone | PrefillLost | DecodeLost | DecodeStarted | Recomputed | FirstToken
Loss = PrefillLost | DecodeLost | Recomputed
Report = (
    LegSucceeded
    | LegFailed
    | PullFailed
    | EngineSeen
    | KvMissing
    | PromptCounted
    | KvAbandoned
    | RemotePrefillEnded
    | SessionEnded
)
FromRelay = (
    Hello
    | Arrival
    | Live
    | CoreEvent
    | Report
    | AskRetry
    | AskPrefiller
    | AskPage
    | Progress
    | Gaps
    | Recorded
    | LegRetried
    | Failure
    | Occupancy
    | Drained
    | Resumed
    | AskAlone
    | EngineDied
    | Looks
)
