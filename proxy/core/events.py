"""What goes into the scheduler (events) and what comes out of it (actions).

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

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", int)
RankId = NewType("RankId", int)
PrefillerId = NewType("PrefillerId", int)


@dataclass(frozen=True, slots=True)
class Eligible:
    """The only instances that can serve a request, whatever becomes of them."""

    prefillers: frozenset[PrefillerId]
    ranks: frozenset[RankId]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What is known of a request when it comes. It never changes.

    Attributes:
        prompt_tokens: May be an estimate until prefill is done.
        slots: Sequences it will run.
        prefill: False if the decode engine computes the prompt itself: the request then goes to
            the pool at once, whatever the pool's limit, and never holds a prefiller.
        decode: False if a prefiller answers the whole request: it then holds that prefiller until
            it ends, and is never in the pool or on a rank.
        eligible: Who can serve it; None for all, also those that are added later.
        max_tokens: The most tokens that one sequence may emit; None if the client set no limit.
        keys: Hashes of ever longer prefixes of the prompt; empty if nobody asked for them.
        model: The model that it names.
        tenant: Whose request it is, for admission rules and queue orders; so are the next three.
        level: Its class of service; lower goes first.
        weight: Its share among equals.
        deadline_ns: When it should have its first token; None for no matter.
    """

    prompt_tokens: int
    slots: int = 1
    prefill: bool = True
    decode: bool = True
    eligible: Eligible | None = None
    max_tokens: int | None = None
    keys: tuple[int, ...] = ()
    model: str = ""
    tenant: str = ""
    level: int = 0
    weight: float = 1.0
    deadline_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client request was accepted; `request` is a number above all earlier ones."""

    request: RequestId
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prefiller holds the prompt's KV cache.

    `lease_expires_ns` is when it may drop the KV cache; None if no lease is known.
    """

    request: RequestId
    prompt_tokens: int
    lease_expires_ns: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """The prefill failed, or its KV cache is gone before decode pulled it: prefill again.

    With `elsewhere` not on the same prefiller, as long as another one is open, be it full. If it is
    bound to a rank it goes to another one then, if one is open; `same_rank` says that it need not.
    Without `decode` the next prefiller answers the whole request.
    """

    request: RequestId
    elsewhere: bool = False
    decode: bool = True
    same_rank: bool = False


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """The rank never took the request: back to the pool, and to another rank if one is open.

    Its KV cache is still on the prefiller, under the same lease.
    """

    request: RequestId


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """The request joined its rank's batch, so the KV transfer is over."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """The fleet passed a barrier: every started request emitted one token."""


@dataclass(frozen=True, slots=True)
class TokensEmitted:
    """One request emitted `tokens` tokens beyond what the completed steps account for.

    Summed over its sequences. Negative if the steps gave it too many, down to leaving it its prompt.
    """

    request: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecomputed:
    """The rank dropped the request's KV cache; it must be prefilled again with what it emitted.

    `elsewhere` says that another rank should take it then, and another prefiller before, if there
    are such.
    """

    request: RequestId
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The request emitted its last token; it need not have been seen to start."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended with an error that no retry can mend."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client left."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RankClosed:
    """The rank takes no new request; what it has continues. It may be closed already."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class RankOpened:
    """The rank takes requests again. It may be open already."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class PrefillerClosed:
    """The prefiller takes no new prefill; what it has continues. It may be closed already."""

    prefiller: PrefillerId


@dataclass(frozen=True, slots=True)
class PrefillerOpened:
    """The prefiller takes prefills again. It may be open already.

    With `on_trial` it takes one request at a time, until it is opened without.
    """

    prefiller: PrefillerId
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Decide now. Feed every event that is due first: one decision then sees them all."""


Event = (
    RequestArrived
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
    | RankClosed
    | RankOpened
    | PrefillerClosed
    | PrefillerOpened
    | Tick
)


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send the prefill of `request` to `prefiller`, or all of it if it never decodes."""

    request: RequestId
    prefiller: PrefillerId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class AbortPrefill:
    """Stop the prefill that runs on `prefiller`."""

    request: RequestId
    prefiller: PrefillerId


@dataclass(frozen=True, slots=True)
class ReleasePrefill:
    """Tell `prefiller` to free KV blocks that no decoder will ever pull."""

    request: RequestId
    prefiller: PrefillerId


@dataclass(frozen=True, slots=True)
class Admit:
    """Send `request` to decode on `rank`."""

    request: RequestId
    rank: RankId


@dataclass(frozen=True, slots=True)
class AbortDecode:
    """Stop decoding `request` on `rank`."""

    request: RequestId
    rank: RankId


@dataclass(frozen=True, slots=True)
class Expire:
    """`request` outlived the queue's or the pool's time to live; answer it with an error."""

    request: RequestId


Action = StartPrefill | AbortPrefill | ReleasePrefill | Admit | AbortDecode | Expire
