"""What sessions report about engines, prompts and themselves, besides the scheduler's events.

Reports are data. Health checks, retry budget, predictors and metrics are shared by all sessions, so
they take reports instead of calls from inside a session.
"""

from msgspec import Struct

from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.live.connectors import MissingKv
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.telemetry.record import RequestRecord


class LegFailed(Struct, frozen=True):
    """A leg failed through its engine's fault."""

    target: Target
    fault: Fault
    reason: str


class LegSucceeded(Struct, frozen=True):
    """An engine answered.

    Attributes:
        target: Which.
        pull: Whose KV cache it has pulled, and which rank it is; None if there was none to pull.
    """

    target: Target
    pull: tuple[PrefillerId, RankId] | None = None


class PullFailed(Struct, frozen=True):
    """A rank failed where it was to pull a KV cache; see `KvTransfers`."""

    request: RequestId
    prefiller: PrefillerId
    rank: RankId
    fault: Fault
    reason: str


class EngineSeen(Struct, frozen=True):
    """A prefill answer named the engine that runs behind a prefiller's address."""

    prefiller: PrefillerId
    engine_id: str


class KvMissing(Struct, frozen=True):
    """A prefiller computed a prompt and left no KV cache that a rank could pull, though it had to."""

    prefiller: PrefillerId
    kind: MissingKv
    reason: str


class PromptCounted(Struct, frozen=True):
    """A prefiller counted the tokens of a prompt."""

    request: RequestId
    prompt_tokens: int


class KvAbandoned(Struct, frozen=True):
    """No rank will pull a KV cache: it is "lost", its lease has "lapsed", or was left to: "cheaper"."""

    how: str


class RemotePrefillEnded(Struct, frozen=True):
    """A prefiller that was chosen by `Host.choose_prefiller` is done, whatever came of it."""

    prefiller: PrefillerId


class StreamLent(Struct, frozen=True):
    """The pump moves a request's stream from now on; `slot` is the stream's number there."""

    request: RequestId
    slot: int


class StreamReturned(Struct, frozen=True):
    """It does so no more, and the number may become another stream's."""

    request: RequestId
    slot: int


class SessionEnded(Struct, frozen=True):
    """A session is over."""

    request: RequestId
    record: RequestRecord


Report = (
    LegFailed
    | LegSucceeded
    | PullFailed
    | EngineSeen
    | KvMissing
    | PromptCounted
    | KvAbandoned
    | RemotePrefillEnded
    | StreamLent
    | StreamReturned
    | SessionEnded
)
