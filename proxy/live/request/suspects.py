"""Prompts that may be what kills engines: under which engines have died, for five minutes each.

A prompt whose engine dies is tried on one engine more. Of two deaths under one prompt the prompt is the
likeliest cause, and it is refused from then on, whoever sends it. The others that were on a dead engine
are suspects as well, until the prompt that explains that death is found. Where more than `FEW` prompts
have died twice with one engine, or only after a long time, none of them is refused: then the engines are the
likelier cause. See docs/failures.md.

Prompts are known by hashes with a key of this process.
"""

import secrets
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.openai.body import dump
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS, SAMPLING, Api

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.body import RequestBody

MOST_DEATHS = 2
"""Engines that may die under one prompt."""

KEPT_S = 300.0
"""How long a prompt is remembered after the last death under it."""

FEW = 4
"""Prompts that are refused at a time: one death explains no more of them."""

SOON_S = 30.0
"""A prompt that was on an engine for longer than that before it died is not the likeliest cause."""

MOST_PROMPTS = 4096
"""Prompts that are remembered; then the one is forgotten that was hit longest ago."""

REASON = "two engines died while they worked on this prompt, so it is not tried again for now"

SUSPECTED = "poison"
"""What a request is refused for whose prompt may kill engines; see `RequestRecord.refused_for`."""

# All that was on an engine loses its connection within this time, as its system closes them at once; what
# is lost later is lost otherwise.
_TOGETHER_S = 0.5
# So long the others on an engine are awaited before it is decided who is refused.
_SETTLED_S = 0.1
# vLLM's server answers for some seconds after its engine has died: what comes then did not kill it.
_DEAD_S = 10.0
_KEY_BYTES = 32
_HASH_BYTES = 16
# Members that change nothing in what an engine computes of the prompt: the form of the answer, who
# asks, how much is asked for, and how tokens are drawn. All others may matter, also unknown ones. The
# model does, but a client that falls back on another one has the same prompt try other engines.
_BESIDE = INTERNAL_FIELDS | {
    "cache_salt",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "metadata",
    "model",
    "n",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "seed",
    "service_tier",
    "session_id",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
}


class Copy(Protocol):
    """One request with a prompt under which an engine has died."""

    def prompt_refused(self) -> None:
        """Take note that the prompt is not to be tried any more."""


class EngineDied(Struct, frozen=True):
    """An engine died while it worked on a prompt: the connection broke, or the engine says so.

    Attributes:
        fingerprint: Of the prompt.
        request_id: Of the request.
        target: The engine.
        sent_s: When it was sent the prompt, by the loop's clock.
        died_s: When it was seen to be dead.
        said: Whether the engine's server lives, and says so.
    """

    fingerprint: bytes
    request_id: str
    target: Target
    sent_s: float
    died_s: float
    said: bool


class Death(Struct, eq=False):
    """One engine's death.

    Attributes:
        hit: When each prompt was sent there that was there.
        ids: Of their requests.
        judged: Whether everybody has been heard, and who is to be refused has been decided.
        explained: Whether one of these prompts is refused for it, so that the others are no suspects.
    """

    target: Target
    at_s: float
    hit: dict[bytes, float] = {}
    ids: list[str] = []
    judged: bool = False
    explained: bool = False


class _Suspect(Struct, eq=False):
    """One prompt; `copies` are requests with it that were sent to engines since the first death."""

    until_s: float
    deaths: list[Death] = []
    refused: bool = False
    copies: dict[Copy, None] = {}  # For its order.

    @property
    def count(self) -> int:
        return sum(not death.explained for death in self.deaths)

    @property
    def is_judged(self) -> bool:
        return all(death.judged for death in self.deaths)


class Suspects:
    """Remembers the prompts under which engines died.

    Args:
        clock: The loop's time, in seconds.
        call_later: The loop's.

    Attributes:
        condemned: Called with a death and the number of prompts that are refused for it.
        prompts: The suspects, by fingerprint; who was hit longest ago first. While there is none it does
            not matter which prompt a request has.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self.condemned: Callable[[Death, int], None] = lambda death, count: None
        self._clock = clock
        self._call_later = call_later
        self.prompts: dict[bytes, _Suspect] = {}
        self._latest: dict[Target, Death] = {}

    def of(self, endpoint: str, body: "RequestBody") -> bytes:
        """Return what names a prompt: a hash of all that an engine computes of a request."""
        beside, sampling = _BESIDE, b""
        if endpoint == Api.GENERATE.value:  # There they stand in a member of their own.
            beside, given = _BESIDE | {SAMPLING}, body.values.get(SAMPLING)
            if isinstance(given, dict):
                rest = sorted(given.keys() - _BESIDE)
                given = {name: given[name] for name in rest}
            sampling = dump(given)
        told = b"\0".join((endpoint.encode(), sampling, body.told_apart_by(beside)))
        return blake2b(told, digest_size=_HASH_BYTES, key=self._key).digest()

    def of_bytes(self, endpoint: str, body: bytes, boundary: bytes = b"") -> bytes:
        """Return what names a request that is not read; a form's boundary is another one each time."""
        told = blake2b(endpoint.encode() + b"\0", digest_size=_HASH_BYTES, key=self._key)
        told.update(body.replace(boundary, b"") if boundary else body)
        return told.digest()

    def deaths(self, fingerprint: bytes) -> int:
        """Return how many engines died under a prompt, as far as nothing else explains that."""
        suspect = self._find(fingerprint)
        return 0 if suspect is None else suspect.count

    def refuses(self, fingerprint: bytes) -> bool:
        """Return whether a prompt is not to be tried any more."""
        suspect = self._find(fingerprint)
        if suspect is None or suspect.refused or suspect.is_judged:
            return suspect is not None and suspect.refused
        if suspect.count >= MOST_DEATHS:
            return True
        twice = self._twice(suspect.deaths[-1])
        return suspect in twice and len(twice) <= FEW

    def sends(self, fingerprint: bytes, copy: Copy) -> None:
        """Note that an engine is to be sent a prompt, until `ended`, unless no engine died under it."""
        suspect = self._find(fingerprint)
        if suspect is not None:
            suspect.copies[copy] = None

    def ended(self, fingerprint: bytes, copy: Copy) -> None:
        """Note that a request is over."""
        suspect = self._find(fingerprint)
        if suspect is not None:
            suspect.copies.pop(copy, None)

    def died(self, report: EngineDied) -> None:
        """Take note of an engine that died under a prompt."""
        self._forget()
        death = self._death(report)
        if death is None or report.fingerprint in death.hit:
            return
        death.hit[report.fingerprint] = report.sent_s
        if len(death.ids) < FEW:
            death.ids.append(report.request_id)
        suspect = self.prompts.pop(report.fingerprint, None) or _Suspect(0.0)
        suspect.until_s = self._clock() + KEPT_S
        suspect.deaths.append(death)
        self.prompts[report.fingerprint] = suspect
        self._judge_soon(death)
        if len(self.prompts) > MOST_PROMPTS:
            del self.prompts[next(iter(self.prompts))]

    def _death(self, report: EngineDied) -> Death | None:
        """Return which death it was; None if the engine was dead before it was sent this prompt."""
        at_s, known = report.died_s, self._latest.get(report.target)
        if known is not None:
            if report.sent_s < known.at_s and at_s < known.at_s + (
                _DEAD_S if report.said else _TOGETHER_S
            ):
                return known
            if report.said and at_s < known.at_s + _DEAD_S:
                return None
        death = self._latest[report.target] = Death(report.target, at_s)
        return death

    def _judge_soon(self, death: Death) -> None:
        if self._call_later is not None and (death.judged or len(death.hit) == 1):
            self._call_later(_SETTLED_S, lambda: self._judge(death))
        death.judged = False

    def _judge(self, death: Death) -> None:
        """Decide which of the prompts on a dead engine are refused, once all have been heard."""
        death.judged = True
        twice = self._twice(death)
        if not twice:
            return
        late = [n for n, sent_s in death.hit.items() if death.at_s - sent_s > SOON_S]
        known = [self.prompts.get(name) for name in late]
        guilty = [one for one in twice if not (one.refused or one in known)]
        if guilty and len(twice) <= FEW:
            for suspect in guilty:
                suspect.refused = True
                for one in suspect.deaths:
                    one.explained = True
            self.condemned(death, len(guilty))
            for copy in [copy for suspect in guilty for copy in suspect.copies]:
                copy.prompt_refused()

    def _twice(self, death: Death) -> list[_Suspect]:
        """Return the prompts on a dead engine under which another one had died.

        If something else explains all of those deaths, it may have been this prompt nevertheless: of two
        that kill, and were on one engine, only one was found.
        """
        there = [one for name in death.hit if (one := self._find(name)) is not None]
        twice = [one for one in there if one.count >= MOST_DEATHS]
        return twice or [one for one in there if len(one.deaths) >= MOST_DEATHS]

    def _find(self, fingerprint: bytes) -> _Suspect | None:
        self._forget()
        return self.prompts.get(fingerprint)

    def _forget(self) -> None:
        """Forget what is too long ago."""
        now_s, suspects = self._clock(), self.prompts
        while suspects and suspects[first := next(iter(suspects))].until_s <= now_s:
            del suspects[first]
        for target in [t for t, one in self._latest.items() if one.at_s + KEPT_S <= now_s]:
            del self._latest[target]
