"""The scheduler's inputs (events) and outputs (actions).

The vocabulary of the whole package is fixed here:

* **request**: one client request; **prompt_tokens** s, tokens emitted so far = **age** a, its KV
  load w = s + a. It takes one **slot** of a rank for each sequence it runs (OpenAI's `n`), so that
  with n slots its load is n s at first and grows by n a step.
* **prefiller**: an engine instance that computes prompts; **rank**: one data-parallel decode
  worker. All ranks of a fleet end each decode **step** together, at the barrier.
* **pool**: requests that wait for a decode slot: prefilled ones, and those that need no prefill.
  **Admit** = bind a pooled request to a rank; the binding lasts until the request leaves decode.

Times are integer nanoseconds of the driver's clock. A request id is its arrival number: ids grow in
order of arrival, and every tie between requests is broken by the lower id.
"""

from collections.abc import Callable, Sequence
from typing import NewType

from msgspec import Struct

# Distinct types, so that a rank is never passed for a prefiller.
RequestId = NewType("RequestId", int)
RankId = NewType("RankId", int)
PrefillerId = NewType("PrefillerId", int)


class Eligible(Struct, frozen=True):
    """The only instances that can serve a request, even if they close or fail."""

    prefillers: frozenset[PrefillerId]
    ranks: frozenset[RankId]


class Ticket(Struct, frozen=True):
    """What the scheduler knows of a request when it arrives. A ticket never changes."""

    prompt_tokens: int  # Possibly an estimate; `PrefillDone` has the real number.
    slots: int = 1  # Sequences that it will run.
    # False if the decode engine computes the prompt itself: the request then goes to the pool at
    # once, whatever the pool's limit, and never holds a prefiller.
    prefill: bool = True
    # False if a prefiller answers the whole request: it then holds that prefiller until it ends,
    # and is never in the pool or on a rank.
    decode: bool = True
    # The instances that can serve it; None for all, also those that are added later.
    eligible: Eligible | None = None
    # The most tokens that one sequence may emit; None if the client set no limit.
    max_tokens: int | None = None
    # What the client expects one sequence to emit; None if it does not say.
    expected_tokens: int | None = None
    # Hashes of properties that it shares with other requests, the most specific first; empty if unused or not
    # admitted yet.
    keys: tuple[int, ...] = ()
    model: str = ""  # The model that it names.
    # The client's identity. This and all that follow are for admission rules and queue orders.
    tenant: str = ""
    level: int = 0  # Its class of service; lower goes first, and 0 is the usual one.
    weight: float = 1.0  # Its share among requests of the same level.
    # When its first token is due: if its client has none by then and no rank has taken it, it
    # expires. None for never.
    deadline_ns: int | None = None
    predicted_tokens: int = 0  # What a predictor expects of each sequence; 0 if none was asked.
    # Hashes of the prompt's blocks, below 2**63, each of all that comes before it too; empty if
    # unused.
    blocks: tuple[int, ...] = ()
    block_tokens: float = 0.0  # Tokens of a block, possibly an estimate.
    # Whether `blocks` are hashes of token ids, which engines report too; see `token_hashes`.
    token_blocks: bool = False
    session: int = 0  # Hash of the name that its client gives its conversation; 0 for none.
    # The rank that it is to go to while that is open, as it has a part of the prompt; None for any.
    home: RankId | None = None
    home_tokens: int = 0  # The tokens that this rank has.
    # Whether its client may get its first token when its prefill ends; see `FirstToken`.
    early_token: bool = False


class RequestArrived(Struct, frozen=True):
    """A client request was accepted; `request` is a number above all earlier ones."""

    request: RequestId
    ticket: Ticket


class FirstToken(Struct, frozen=True):
    """The client got the first token of a request while a prefiller has it.

    The prefiller made it, and answers the whole request or leaves the rest to a rank. A rank's own first
    token is a `DecodeStarted`. A second event changes nothing.
    """

    request: RequestId


class PrefillDone(Struct, frozen=True):
    """The prefiller holds the prompt's KV cache.

    `lease_expires_ns` is when it may drop the KV cache; None if no lease is known. `cached_tokens` of
    the prompt were in its prefix cache; None if it does not say.
    """

    request: RequestId
    prompt_tokens: int
    lease_expires_ns: int | None = None
    cached_tokens: int | None = None


class PrefillLost(Struct, frozen=True):
    """The prefill failed, or its KV cache was lost before decode pulled it: prefill again."""

    request: RequestId
    # Avoid the same prefiller while another one is open, even if that one is full.
    elsewhere: bool = False
    decode: bool = True  # False if the next prefiller answers the whole request.
    # False to avoid the rank that it was bound to while another one is open.
    same_rank: bool = False


class DecodeLost(Struct, frozen=True):
    """The rank never took the request: back to the pool, and to another rank if one is open.

    Its KV cache is still on the prefiller, under the same lease.
    """

    request: RequestId


class DecodeStarted(Struct, frozen=True):
    """The request joined its rank's batch, so the KV transfer is over.

    Without `token_seen`, the driver only expects the first token to have come by now.
    """

    request: RequestId
    token_seen: bool = True


class StepCompleted(Struct, frozen=True):
    """The fleet passed a barrier: every started request emitted one token.

    `duration_ns` is the time of the step; None if it was not measured.
    """

    duration_ns: int | None = None


class TokensEmitted(Struct, frozen=True):
    """One request emitted `tokens` tokens beyond what the completed steps account for.

    Summed over its sequences. Negative if the steps counted too many, at most back to the prompt.
    """

    request: RequestId
    tokens: int


class RequestRecomputed(Struct, frozen=True):
    """The rank dropped the request's KV cache; it must be prefilled again with its emitted tokens.

    With `elsewhere` the scheduler avoids the rank, and the prefiller that it pulled from, while another
    one is open. With `anew` the answer begins again: the emitted tokens are not prefilled.
    """

    request: RequestId
    elsewhere: bool = False
    anew: bool = False


class RequestFinished(Struct, frozen=True):
    """The request emitted its last token; `DecodeStarted` need not have come before."""

    request: RequestId


class RequestFailed(Struct, frozen=True):
    """The request ended with an error that is not retried."""

    request: RequestId


class RequestCancelled(Struct, frozen=True):
    """The client left."""

    request: RequestId


class RankClosed(Struct, frozen=True):
    """The rank takes no new requests; those that it has continue. It may be closed already."""

    rank: RankId


class RankOpened(Struct, frozen=True):
    """The rank takes requests again. It may be open already.

    With `on_trial` it takes one request, and no other until that has its first token. If it is `cold`,
    its share grows from there; see `warm_up`.
    """

    rank: RankId
    on_trial: bool = False
    cold: bool = False


class PrefillerClosed(Struct, frozen=True):
    """The prefiller takes no new requests; those that it has continue. It may be closed already."""

    prefiller: PrefillerId


class PrefillerOpened(Struct, frozen=True):
    """The prefiller takes requests again. It may be open already.

    With `on_trial` it takes one request at a time, until it is opened without it. If it is `cold`, its
    share grows with what it answers; see `warm_up`.
    """

    prefiller: PrefillerId
    on_trial: bool = False
    cold: bool = False


class PrefillerPaired(Struct, frozen=True):
    """Only these ranks can use the prefiller's KV caches; None for all, also those added later."""

    prefiller: PrefillerId
    ranks: frozenset[RankId] | None


class EngineLoad(Struct, frozen=True):
    """The load in an engine's metrics; the mean of several ranks."""

    waiting: float  # Requests that wait there.
    running: float  # Requests that run there.
    kv_usage: float  # Share of its KV cache in use, 0 to 1.


class PrefillerScraped(Struct, frozen=True):
    """The proxy has read a prefiller's metrics."""

    prefiller: PrefillerId
    load: EngineLoad


class ForeignLoad(Struct, frozen=True):
    """A rank runs requests that this scheduler did not send there."""

    rank: RankId
    slots: int  # Slots of those requests; 0 once there are none.
    kv_tokens: int  # Those that they hold; 0 if unknown.


class Tick(Struct, frozen=True):
    """Decide now. Feed every event that is due first, so that one decision sees them all."""


InstanceEvent = (
    RankClosed
    | RankOpened
    | PrefillerClosed
    | PrefillerOpened
    | PrefillerPaired
    | PrefillerScraped
    | ForeignLoad
)
Event = (
    RequestArrived
    | FirstToken
    | PrefillDone
    | PrefillLost
    | DecodeLost
    | DecodeStarted
    | StepCompleted
    | TokensEmitted
    | RequestRecomputed
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | InstanceEvent
    | Tick
)


class StartPrefill(Struct, frozen=True):
    """Send the prefill of `request` to `prefiller`; the whole request if it is direct."""

    request: RequestId
    prefiller: PrefillerId
    prompt_tokens: int


class AbortPrefill(Struct, frozen=True):
    request: RequestId
    prefiller: PrefillerId


class ReleasePrefill(Struct, frozen=True):
    """Have `prefiller` free KV blocks that no rank will pull.

    `cheaper` if the scheduler let their lease end because forcing the request in would have cost more.
    """

    request: RequestId
    prefiller: PrefillerId
    cheaper: bool = False


class Admit(Struct, frozen=True):
    """Send `request` to decode on `rank`."""

    request: RequestId
    rank: RankId


class AbortDecode(Struct, frozen=True):
    request: RequestId
    rank: RankId


class Expire(Struct, frozen=True):
    """The time to live of `request` ended in the queue or the pool; answer it with an error."""

    request: RequestId


Action = StartPrefill | AbortPrefill | ReleasePrefill | Admit | AbortDecode | Expire
Observer = Callable[[Event, Sequence[Action], int], None]
"""Called with each event, its actions in order and the time in ns, before any action is performed."""
