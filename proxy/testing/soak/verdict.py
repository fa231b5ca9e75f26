"""Whether what a client saw is right: the whole true answer, or a true error."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from balanceroute.proxy.testing.soak.client import Seen
from balanceroute.proxy.testing.soak.plans import Plan
from balanceroute.proxy.wire.sse import EventScanner, event_data

# Of errors that are the engines' fault or the proxy's state. The clients make none.
_STATUSES = frozenset({429, 500, 502, 503, 504})
_SHOWN_BYTES = 200


class Kind(Enum):
    """What became of a request, for its client."""

    RIGHT = "answered"
    ENDED_EARLY = "ended by its first token"  # The fault `eos_first`.
    ERROR = "error"
    LEFT = "left"
    CUT = "cut off without a word"
    HUNG = "without an end"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer was.

    Attributes:
        kind: What became of the request.
        status: Of the answer; 0 if none came.
        wrong: What is wrong with it; empty if nothing is.
    """

    kind: Kind
    status: int
    wrong: str = ""


@dataclass(slots=True)
class _Stream:
    """What the events of a stream say."""

    texts: list[str]
    reasons: list[str]
    usage: Mapping[str, Any] | None = None
    error: str = ""
    done: bool = False
    surplus: list[bytes] = field(default_factory=list)  # After the end.


def judge(plan: Plan, seen: Seen) -> Verdict:
    """Return what a client got for its request."""
    if seen.hung:
        return Verdict(Kind.HUNG, seen.status, f"no end: {bytes(seen.body[-_SHOWN_BYTES:])!r}")
    if seen.malformed:
        return Verdict(Kind.CUT, seen.status, f"not HTTP: {seen.malformed}")
    if not seen.status:
        if seen.left:
            return Verdict(Kind.LEFT, 0)
        return Verdict(Kind.CUT, 0, f"no answer: {seen.ending}")
    if seen.status != 200:
        if seen.left:
            return Verdict(Kind.LEFT, seen.status)
        return Verdict(Kind.ERROR, seen.status, _wrong_with_error(seen))
    if (b"x-request-id", plan.name.encode()) not in seen.headers:
        return Verdict(Kind.RIGHT, 200, "the answer does not name its request")
    return _judge_stream(plan, seen) if plan.stream else _judge_whole(plan, seen)


def _wrong_with_error(seen: Seen) -> str:
    shown = bytes(seen.body[:_SHOWN_BYTES])
    if seen.status not in _STATUSES:
        return f"status {seen.status}: {shown!r}"
    if not seen.complete:
        return "the error is cut off"
    try:
        said = bool(json.loads(seen.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = False
    return "" if said else f"the error is {shown!r}"


def _judge_whole(plan: Plan, seen: Seen) -> Verdict:
    if not seen.complete:
        if seen.left:
            return Verdict(Kind.LEFT, 200)
        return Verdict(Kind.CUT, 200, f"the answer is cut off: {seen.ending}")
    try:
        answer = json.loads(seen.body)
        choices = sorted(answer["choices"], key=lambda one: one["index"])
        texts = [one["message"]["content"] if plan.chat else one["text"] for one in choices]
        reasons = [one["finish_reason"] for one in choices]
        usage = answer["usage"]
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(Kind.RIGHT, 200, f"the answer cannot be read: {error!r}")
    return _compared(plan, texts, reasons, usage)


def _judge_stream(plan: Plan, seen: Seen) -> Verdict:
    scanner = EventScanner()
    stream = _Stream([""] * len(plan.texts), [""] * len(plan.texts))
    try:
        for event in scanner.feed(bytes(seen.body)):
            _take(stream, event_data(event), chat=plan.chat)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return Verdict(Kind.RIGHT, 200, f"an event cannot be read: {error!r}")
    for said, right in zip(stream.texts, plan.texts, strict=True):
        if not right.startswith(said):
            return Verdict(Kind.RIGHT, 200, f"said {said[-60:]!r}, which is not of {right[:60]!r}")
    if seen.left:
        return Verdict(Kind.LEFT, 200)
    if stream.error:
        return Verdict(Kind.ERROR, 200)
    if not seen.complete:
        return Verdict(Kind.CUT, 200, f"the stream is cut off without a word: {seen.ending}")
    if not stream.done or stream.surplus or scanner.tail:
        return Verdict(Kind.RIGHT, 200, f"[DONE] is not the end: {stream.surplus[:2]}")
    if (stream.usage is not None) != plan.wants_usage:
        return Verdict(Kind.RIGHT, 200, f"usage is {stream.usage}")
    return _compared(plan, stream.texts, stream.reasons, stream.usage)


def _take(stream: _Stream, payload: bytes, *, chat: bool) -> None:
    if stream.done:
        stream.surplus.append(payload[:_SHOWN_BYTES])
        return
    if payload == b"[DONE]":
        stream.done = True
        return
    value = json.loads(payload)
    if stream.error:
        stream.surplus.append(payload[:_SHOWN_BYTES])
    elif "error" in value:
        stream.error = str(value["error"]["message"])
    else:
        stream.usage = value.get("usage") or stream.usage
        for choice in value["choices"]:
            index = choice["index"]
            said = choice["delta"].get("content") if chat else choice["text"]
            stream.texts[index] += said or ""
            stream.reasons[index] = choice["finish_reason"] or stream.reasons[index]


def _compared(
    plan: Plan, texts: list[str], reasons: list[str], usage: Mapping[str, Any] | None
) -> Verdict:
    """Compare a complete answer with the right one."""
    count = len(plan.texts)
    kind, expected = Kind.RIGHT, (plan.texts, plan.reasons, plan.tokens)
    if not any(texts) and any(plan.texts):
        kind, expected = Kind.ENDED_EARLY, (("",) * count, ("stop",) * count, count)
    counted = (plan.prompt_tokens, expected[2])
    if usage is not None:
        counted = usage["prompt_tokens"], usage["completion_tokens"]
    if counted != (plan.prompt_tokens, expected[2]):
        return Verdict(kind, 200, f"usage is {usage}, not {plan.prompt_tokens, expected[2]}")
    if (tuple(texts), tuple(reasons)) != expected[:2]:
        return Verdict(kind, 200, f"said {texts}, {reasons}, not {expected[:2]}")
    return Verdict(kind, 200)
