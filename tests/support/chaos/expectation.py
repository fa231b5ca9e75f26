"""Comparison of what a client got with what it should have got.

A stream is compared event by event. Where several choices share a stream, each choice is compared by
itself: which one speaks first is a matter of time. The comparison recognises what an engine spoilt on
purpose if it is given the kinds of spoiling.
"""

import asyncio
import json
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.chaos.requests import AGENTS, ClientRequest, with_seed

from balanceroute.proxy.lab.emulate.faults import MalformedStream
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import Response
from balanceroute.proxy.wire.sse import EventScanner, event_data

# What each request must be answered: the answers of one engine that nothing is wrong with.
#
# The reference engine has no other clients, and room for everything. As the request alone decides the
# emulated model's text, whatever the proxy and its engines go through must end in the same answer. The
# comparison ignores what differs between engines: times, fingerprints, the id's suffix.

_TIMEOUT_S = 3_600.0
_MAX_BYTES = 1 << 30
_AT_A_TIME = 64
_CREATED = re.compile(rb'"(created(?:_at)?)":\d+')
# Of a response and its items, and what vouches for thoughts: no two are alike.
_DRAWN = re.compile(rb'"((?:resp|msg|rs|fc|ctc)_|signature":")[0-9a-f]{16,32}"')

_FINGERPRINT_MEMBER = re.compile(rb'"system_fingerprint":"vllm-[^"]*"')


class TextOracle:
    """A reference engine.

    Attributes:
        merges: Whether engines may put several tokens into one event.
    """

    def __init__(self, settings: EmulationSettings) -> None:
        self.merges = settings.merged_outputs > 0
        self._fleet = EmulatedFleet(
            replace(
                settings,
                prefillers=0,
                ranks=1,
                dp_mode=DpMode.PORTS,
                rank_kv_tokens=None,
                # As fast as can be: only what is said matters.
                step_base_ns=1,
                step_ns_per_token=0.0,
                prefill_base_ns=0,
                prefill_ns_per_token=0.0,
            ),
            rng=random.Random(0),
        )
        self._endpoint: Endpoint
        self._known: dict[tuple[int, bool, int | None, bool], Response] = {}

    async def start(self) -> None:
        await self._fleet.start()
        self._endpoint = Endpoint("127.0.0.1", self._fleet.engines[0].port)

    async def learn(self, requests: Sequence[ClientRequest]) -> None:
        """Get the answers to many requests at a time, which real time is short for otherwise."""
        for begin in range(0, len(requests), _AT_A_TIME):
            some = requests[begin : begin + _AT_A_TIME]
            await asyncio.gather(*(self.answer(request) for request in some))

    async def answer(
        self,
        request: ClientRequest,
        *,
        eos_first: bool = False,
        seed: int | None = None,
        as_prefiller: bool = False,
    ) -> Response:
        """Return the answer to a request.

        Args:
            request: The request.
            eos_first: Whether the first token ends it.
            seed: The one that the proxy drew for it.
            as_prefiller: Whether to draw as a prefiller does, which is otherwise without a seed.
        """
        key = request.number, eos_first, seed, as_prefiller
        if key not in self._known:
            body, values = request.body, dict(request.values)
            # With it an engine without a seed draws as a prefiller, and no client may give it.
            steered = values.pop("kv_transfer_params", None) is not None
            if as_prefiller:
                values["kv_transfer_params"] = {"do_remote_decode": True}
            if steered or as_prefiller or seed is not None:
                body = json.dumps(values if seed is None else with_seed(values, seed)).encode()
            self._known[key] = await self._ask(request, body, eos_first=eos_first)
        return self._known[key]

    async def _ask(self, request: ClientRequest, body: bytes, *, eos_first: bool) -> Response:
        self._fleet.faults.set("all", eos_first=float(eos_first))
        return await fetch(
            self._endpoint,
            b"POST",
            request.path.encode(),
            [
                (b"content-type", b"application/json"),
                (b"x-request-id", request.request_id.encode()),
            ],
            body,
            timeout_s=_TIMEOUT_S,
            max_bytes=_MAX_BYTES,
        )

    async def close(self) -> None:
        self._endpoint.close()
        await self._fleet.close()


def comparable(body: bytes, request_id: str) -> bytes:
    """Return an answer without what differs between two right answers.

    The id is the request's own, but may have a suffix of eight digits if it was in use.
    """
    body = _CREATED.sub(rb'"\1":0', body)
    body = _DRAWN.sub(rb'"\1-"', body)
    body = _FINGERPRINT_MEMBER.sub(b'"system_fingerprint":"-"', body)
    name = re.escape(request_id.encode())
    own = re.compile(
        rb'"((?:request_)?id)":"((?:(?:chat)?cmpl|generate-tokens)-%b)-[0-9a-f]{8}"' % name
    )
    return own.sub(rb'"\1":"\2"', body)


ABORT = "abort"
"""The finish reason of an answer that an engine aborted."""

ABORTED = b'"finish_reason":"%b"' % ABORT.encode()
"""What an event of one has."""

_DONE = b"[DONE]"
_MAX_EVENT_BYTES = 64 << 20
# An agent's message counts the cached tokens and the rest of the prompt apart.
_CACHED = re.compile(rb'"(cached_tokens|(?:cache_read_)?input_tokens)":\d+')
# What the proxy asks engines for and hides, so far as it can read it; it may be cut off.
_ASKED = re.compile(
    rb',"usage":[^{}]*(?:\{(?:[^{}]|\{[^{}]*\}?)*\}?)?|,"system_fingerprint":"[^"]*"'
)
_MEMBER = b',"usage":'
_FINGERPRINT = b',"system_fingerprint":"-"'
_DETAILS = re.compile(rb',"(?:prompt|completion)_tokens_details":\{[^{}]*\}')
_TOTAL = b'"choices":[]'
_HANDED_BACK = b'"stop_reason":"recomputed"'
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"
_EXTRA_FIELDS = (b":", b"event:", b"id:", b"retry:")
# Those after which the bytes of an event are not what they were.
_CUTTING = frozenset({MalformedStream.BAD_JSON})
_SHOWN = 120


def events_of(body: bytes) -> list[bytes]:
    """Return the complete events of a stream."""
    # A blank line that is known to be complete, so that a lone CR at the end is seen.
    return EventScanner(max_event_bytes=_MAX_EVENT_BYTES).feed(body + b":")


def error_of(text: bytes) -> str | None:
    """Return the message of the error in a body or an event's data, in any form; None if it has none."""
    try:
        message = json.loads(text)
    except ValueError:
        return None
    if not isinstance(message, dict):
        return None
    error = message.get("error", message if message.get("object") == "error" else None)
    words = error.get("message") if isinstance(error, dict) else None
    return words if isinstance(words, str) else None


def usage_tokens(body: bytes) -> int:
    """Return the tokens of all choices by an answer's usage; 0 without one."""
    found = re.findall(rb'"(?:completion|output)_tokens":(\d+)', body)
    return int(found[-1]) if found else 0


class Expectation:
    """The right answer to one request.

    Args:
        request: The request.
        answer: The right answer.
        spoilt: In which ways engines may have spoilt a stream.
        reworded: Whether only what is said counts, not how it is written or cut into events.
        cached_known: Whether it is known how many prompt tokens the prefiller had cached.
        completed: Whether the proxy may have written the end of a stream, which an engine had lost.
        aborts: Whether the proxy may have had engines abort it: then a choice of an unfinished stream may
            have ended so.
    """

    def __init__(
        self,
        request: ClientRequest,
        answer: Response,
        *,
        spoilt: Collection[MalformedStream] = frozenset(),
        reworded: bool = False,
        cached_known: bool = True,
        completed: bool = False,
        aborts: bool = False,
    ) -> None:
        self.status = answer.status
        self._request = request
        self._spoilt = frozenset(spoilt)
        self._reworded = reworded
        self._cached_known = cached_known
        self._completed = completed
        self._aborts = aborts
        self._unfinished = False  # Whether a stream is judged that had no time for its end.
        self._body = self._comparable(answer.body)
        self._choices: dict[int, list[bytes]] = {}
        self._end: list[bytes] = []
        if self.status == 200 and request.stream:
            self._split()

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices by usage; 0 without one."""
        return usage_tokens(self._body)

    def differs(self, body: bytes) -> str:
        """Return how a whole answer is wrong; empty if it is right."""
        body = self._comparable(body)
        if body == self._body:
            return ""
        if self._reworded:
            bare = _bare if self._completed else bytes
            return _meant(bare(self._body), bare(body), stream=self._request.stream)
        if self.status != 200 or not self._request.stream:
            return _first_difference(self._body, body)
        progress = _Progress(self)
        for event in events_of(body):
            if wrong := progress.take(event):
                return wrong
        return progress.missing()

    def strays(self, events: list[bytes]) -> str:
        """Return how the events of an unfinished stream are wrong; empty if they are a beginning."""
        aborted = self._aborts and any(ABORTED in event for event in events)
        if self._reworded or aborted:
            said, wanted = _said(_messages(events)), _said(_messages(events_of(self._body)))
            for speech in said.values():
                if aborted and speech.finish_reason == ABORT:
                    speech.finish_reason = None
            strays = [one for one in said if one not in wanted or not wanted[one].begins(said[one])]
            return f"{said[strays[0]]} where {wanted.get(strays[0])} belongs" if strays else ""
        self._unfinished = True
        progress = _Progress(self)
        for event in events:
            if wrong := progress.take(self._comparable(event)):
                return wrong
        return ""

    def stops_sooner(self, body: bytes) -> bool:
        """Return whether a whole stream of one choice says a beginning of the answer, and stops there."""
        said, wanted = (_said(_messages(events_of(one))) for one in (body, self._body))
        if list(said) != [0] or list(wanted) != [0] or said[0].finish_reason != "stop":
            return False
        # The end of the text has an id, too.
        begun = replace(said[0], finish_reason=None, ids=said[0].ids[:-1])
        return wanted[0].begins(begun)

    def strays_until_aborted(self, body: bytes) -> str:
        """Return how a whole answer that an engine aborted by order is wrong; empty if it is a beginning."""
        stream = self._request.stream
        wanted, said = (
            _said(_messages(events_of(one)) if stream else [json.loads(one)])
            for one in (self._body, self._comparable(body))
        )
        for index, speech in said.items():
            # Agents' APIs say nothing of it, or that the answer is complete.
            if speech.finish_reason == ABORT or self._request.path in AGENTS:
                speech.finish_reason = None
            # An engine sends a call that is cut off as text.
            if index in wanted and wanted[index].call and speech.finish_reason is None:
                continue
            if index not in wanted or not wanted[index].begins(speech):
                return f"{speech} where {wanted.get(index)} belongs"
        return ""

    def _comparable(self, body: bytes) -> bytes:
        body = comparable(body, self._request.request_id)
        return body if self._cached_known else _CACHED.sub(rb'"\1":0', body)

    def _split(self) -> None:
        for event in events_of(self._body):
            index = _index(event)
            if index is None:
                self._end.append(event)
            else:
                self._choices.setdefault(index, []).append(event)

    def _is(self, wanted: bytes, event: bytes) -> bool:
        if wanted == event:
            return True
        # The proxy asks engines for the total, which has the fingerprint too, and did not come.
        if (self._unfinished or self._completed) and _bare(wanted) == _bare(event):
            return True
        if not self._spoilt:
            return False
        # The proxy leaves everything in a line that is no event as the engine sent it.
        plain, said = (_ASKED.sub(b"", _CACHED.sub(b"", _plain(one))) for one in (wanted, event))
        if said == plain or said == plain.removeprefix(b"data: "):
            return True
        if not self._spoilt & _CUTTING:
            return False
        cut = next(
            (size for size in range(len(_MEMBER), 0, -1) if said.endswith(_MEMBER[:size])), 0
        )
        said = said[: len(said) - cut]
        return bool(said) and plain.startswith(said)


def _bare(event: bytes) -> bytes:
    """Return an event without the members that only an engine's total has."""
    return _DETAILS.sub(b"", event.replace(_FINGERPRINT, b""))


class _Progress:
    """How far a stream has come along the right one."""

    def __init__(self, expected: Expectation) -> None:
        self._expected = expected
        self._waiting = {index: list(events) for index, events in expected._choices.items()}
        self._end = list(expected._end)
        self._taken: list[bytes] = []

    def take(self, event: bytes) -> str:
        """Take the next event; return what is wrong with it."""
        expected = self._expected
        for index, events in self._waiting.items():
            if expected._is(events[0], event):
                self._taken.append(events.pop(0))
                if not events:
                    del self._waiting[index]
                return ""
        if not self._waiting and self._end and expected._is(self._end[0], event):
            del self._end[0]
            return ""
        # What says nothing to the client, and is no event to the proxy, stays.
        odd = not _plain(event) or _TOTAL in event or _HANDED_BACK in event
        # So do a rank's own first tokens, without data, where the prefiller's came early.
        again = not event_data(event) and any(expected._is(one, event) for one in self._taken)
        if expected._spoilt and (odd or again):
            return ""
        wanted = [events[0] for events in self._waiting.values()] or self._end[:1]
        return _first_difference(wanted[0] if wanted else b"", event)

    def missing(self) -> str:
        left = [event for events in self._waiting.values() for event in events] + self._end
        return f"{len(left)} events are missing, {_shown(left[0])} first" if left else ""


@dataclass(slots=True)
class _Speech:
    """What one choice says."""

    text: str = ""
    thought: str = ""
    call: str = ""
    finish_reason: str | None = None
    stop_reason: object = None
    logprobs: list[object] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def begins(self, other: "_Speech") -> bool:
        """Return whether `other` is the beginning of this one, all of it if it has ended."""
        if other.finish_reason is not None:
            return self == other
        count = len(other.logprobs)
        return (
            self.text.startswith(other.text)
            and self.thought.startswith(other.thought)
            and self.call.startswith(other.call)
            and self.logprobs[:count] == other.logprobs
            and self.ids[: len(other.ids)] == other.ids
        )


def _said(messages: Iterable[Mapping[str, Any]]) -> dict[int, _Speech]:
    """Return what each choice says in an answer or in the events of a stream."""
    said: dict[int, _Speech] = {}
    for message in messages:
        if "type" in message or "output" in message:
            _add_message(said.setdefault(0, _Speech()), message)
        for choice in message.get("choices") or ():
            speech = said.setdefault(choice["index"], _Speech())
            part = choice.get("message") or choice.get("delta") or {}
            speech.text += choice.get("text") or part.get("content") or ""
            speech.thought += part.get("reasoning") or ""
            for call in part.get("tool_calls") or ():
                speech.call += call.get("id") or ""
                function = call["function"]
                speech.call += f"{function.get('name', '')}{function.get('arguments', '')}"
            speech.finish_reason = choice.get("finish_reason") or speech.finish_reason
            speech.stop_reason = choice.get("stop_reason") or speech.stop_reason
            speech.logprobs += _tokens(choice.get("logprobs") or {})
            speech.ids += choice.get("token_ids") or ()
    return said


def _add_message(speech: _Speech, message: Mapping[str, Any]) -> None:
    """Add what an answer of an agent's API says, or an event of its stream."""
    kind = message.get("type")
    if kind == "message" or "output" in message:
        blocks = message.get("content") or message.get("output") or ()
        for block in blocks:
            _add_block(speech, block)
        speech.finish_reason = message.get("stop_reason", message.get("status"))
        speech.stop_reason = message.get("stop_sequence")
        return
    delta = message.get("delta")
    if kind == "content_block_start":
        speech.call += message["content_block"].get("name") or ""
    elif kind == "response.output_item.added":
        speech.call += message["item"].get("name") or ""
    elif kind == "message_delta" and isinstance(delta, dict):
        speech.finish_reason = delta["stop_reason"]
        speech.stop_reason = delta["stop_sequence"]
    elif kind == "response.completed":
        speech.finish_reason = message["response"]["status"]
    elif isinstance(delta, dict):
        _add_block(speech, delta)
    elif isinstance(delta, str):
        name = {"response.output_text": "text", "response.reasoning_text": "thought"}
        member = name.get(str(kind).removesuffix(".delta"), "call")
        setattr(speech, member, getattr(speech, member) + delta)
        speech.logprobs += message.get("logprobs") or ()


def _add_block(speech: _Speech, block: Mapping[str, Any]) -> None:
    """Add what a block of a message says, an item of a response, or a part of either."""
    if block.get("type") in ("message", "reasoning"):
        for part in block.get("content") or ():
            if block["type"] == "reasoning":
                speech.thought += part["text"]
            else:
                speech.text += part["text"]
                speech.logprobs += part.get("logprobs") or ()
        return
    speech.text += block.get("text") or ""
    speech.thought += block.get("thinking") or ""
    speech.call += block.get("name") or ""
    for name in ("partial_json", "arguments"):
        speech.call += block.get(name) or ""
    if "input" in block:
        speech.call += json.dumps(block["input"])


def _tokens(logprobs: Mapping[str, Any]) -> Iterable[object]:
    """Return each token of log-probabilities."""
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("text_offset", "tokens", "token_logprobs", "top_logprobs")
    return zip(*(logprobs.get(name, ()) for name in names), strict=True)


def _messages(events: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return what the events of a stream carry."""
    found = []
    for event in events:
        try:
            message = json.loads(event_data(event))
        except ValueError:
            continue
        if isinstance(message, dict):
            found.append(message)
    return found


def _meant(wanted: bytes, got: bytes, *, stream: bool) -> str:
    """Return how what an answer says is wrong."""
    answers = []
    for body in (wanted, got):
        if stream:
            messages = _messages(events_of(body))
            ending = [_ending(event) for event in events_of(body)][-1:]
        else:
            messages, ending = [json.loads(body)], []
        usage = [one for one in map(_usage, messages) if one][-1:]
        answers.append((_said(messages), usage, ending))
    return "" if answers[0] == answers[1] else f"{answers[1]} where {answers[0]} belongs"


def _index(event: bytes) -> int | None:
    """Return which choice an event belongs to."""
    data = event_data(event)
    if data == _DONE:
        return None
    message = json.loads(data)
    if "type" in message:  # Agents' APIs have one.
        return 0
    choices = message.get("choices")
    return choices[0]["index"] if choices else None


def _usage(message: Mapping[str, Any]) -> object:
    """Return the usage in an answer or an event."""
    return message.get("usage") or (message.get("response") or {}).get("usage")


def _ending(event: bytes) -> bytes:
    """Return what an event, if it is the last one, says of the end of its stream."""
    data = event_data(event)
    try:
        message = json.loads(data)
    except ValueError:
        return data
    kind = message.get("type") if isinstance(message, dict) else None
    return kind.encode() if isinstance(kind, str) else data


def _plain(event: bytes) -> bytes:
    """Return an event without what a spoiling adds."""
    lines = _LINE_END.split(event.removeprefix(_BOM).replace(b"\0", b""))
    return b"\n".join(line for line in lines if line and not line.startswith(_EXTRA_FIELDS))


def _first_difference(wanted: bytes, got: bytes) -> str:
    both = min(len(wanted), len(got))
    place = next((i for i in range(both) if wanted[i] != got[i]), both)
    begin = max(0, place - _SHOWN // 3)
    return f"at byte {place}: {_shown(got[begin:])} where {_shown(wanted[begin:])} belongs"


def _shown(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
