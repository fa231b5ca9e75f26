"""What goes into the scheduler (events) and what comes out of it (actions).

The vocabulary of the whole package is fixed here:

* **request**: one client request; **prompt_tokens** s, tokens emitted so far = **age** a, its KV
  load w = s + a.
* **prefiller**: an engine instance that computes prompts; **rank**: one data-parallel decode
  worker. All ranks of a fleet end each decode **step** together, at the barrier.
* **pool**: prefilled requests that wait for a decode slot. **Admit** = bind a pooled request to a
  rank; the binding lasts until the request leaves decode.

Times are integer nanoseconds of the driver's clock. A request id is its arrival number: ids grow in
order of arrival, and every tie between requests is broken by the lower id.
"""

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", int)
RankId = NewType("RankId", int)
PrefillerId = NewType("PrefillerId", int)


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client request was accepted. `prompt_tokens` may be an estimate until prefill is done."""

    request: RequestId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prefiller holds the prompt's KV cache; `lease_expires_ns` is when it may drop it."""

    request: RequestId
    prompt_tokens: int
    lease_expires_ns: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """The prefill failed, or its KV cache is gone before decode pulled it: prefill again."""

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
    """One request emitted `tokens` tokens beyond what the completed steps account for."""

    request: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecomputed:
    """The rank dropped the request's KV cache; it must be prefilled again with what it emitted."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The request emitted its last token."""

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
class Tick:
    """Decide now. Feed every event that is due first: one decision then sees them all."""


Event = (
    RequestArrived
    | PrefillDone
    | PrefillLost
    | DecodeStarted
    | StepCompleted
    | TokensEmitted
    | RequestRecomputed
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | Tick
)


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send the prefill probe of `request` to `prefiller`."""

    request: RequestId
    prefiller: PrefillerId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class AbortPrefill:
    """Stop the probe that runs on `prefiller`."""

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
    """`request` outlived the pool's time to live; answer the client with an error."""

    request: RequestId


Action = StartPrefill | AbortPrefill | ReleasePrefill | Admit | AbortDecode | Expire
