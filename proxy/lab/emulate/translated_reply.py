"""A reply that gets the chat API's answer and sends that of another API."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.lab.emulate.answer import DONE
from balanceroute.proxy.lab.emulate.faults import malformed_write
from balanceroute.proxy.lab.emulate.request import compact
from balanceroute.proxy.wire.sse import EventScanner, event_data

if TYPE_CHECKING:
    from balanceroute.proxy.lab.emulate.faults import MalformedStream
    from balanceroute.proxy.wire.messages import Headers, Reply


_MAX_EVENT_BYTES = 64 << 20


class TranslatedReply:
    """A reply that gets the chat API's answer, and sends another one.

    What is no such answer (an injected fault) is forwarded unchanged.
    """

    def __init__(self, reply: "Reply") -> None:
        self.reply = reply  # The one that is sent.
        self._put: Callable[[bytes], None] = reply.write
        self._scanner = EventScanner(max_event_bytes=_MAX_EVENT_BYTES)

    closed = property(lambda self: self.reply.closed)
    started = property(lambda self: self.reply.started)
    paused = property(lambda self: self.reply.paused)

    @property
    def on_closed(self) -> Callable[[], None] | None:
        """Called once if the client leaves before the answer is complete."""
        return self.reply.on_closed

    @on_closed.setter
    def on_closed(self, called: Callable[[], None] | None) -> None:
        self.reply.on_closed = called

    def spoil(self, kind: "MalformedStream") -> None:
        """Write malformed events from now on."""
        self._put = malformed_write(kind, self.reply.write)

    def translated(self, status: int, body: bytes) -> bytes:
        try:
            return compact(self._whole(status, json.loads(body)))
        except (ValueError, KeyError, TypeError):
            return body

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        self.reply.send(status, headers, self.translated(status, body))

    def start(self, status: int, headers: "Headers") -> None:
        self.reply.start(status, headers)

    def write(self, data: bytes) -> None:
        for event in self._scanner.feed(data):
            try:
                translated = list(self._events(event_data(event)))
            except (ValueError, KeyError, TypeError):
                translated = [event]
            for one in translated:
                self._put(one)

    def end(self) -> None:
        self.reply.end()

    def abort(self) -> None:
        self.reply.abort()

    def _whole(self, status: int, value: dict[str, Any]) -> object:
        """Return the body of a whole answer; raises ValueError, KeyError or TypeError for none."""
        raise NotImplementedError

    def _events(self, data: bytes) -> Iterator[bytes]:
        """Yield the events for the data of one; raises ValueError, KeyError or TypeError for none."""
        raise NotImplementedError


def named_event(kind: str, value: object) -> bytes:
    """Return an event of a stream whose events are named."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), compact(value))


# Answers as vLLM's Rust frontend writes them (`VLLM_USE_RUST_FRONTEND=1`), from those of its
# Python frontend.
#
# By its sources (`rust/src/server/src/routes`): its streams leave out what is null; the reason
# for the end has an event of its own, and so have the prompt's ids of a completion; errors have
# words for codes. Whole answers name every member, as in Python, but those to token ids have no
# usage.

# The first members of all events of a stream.
_HEAD = ("id", "object", "created", "model", "request_id")
_USAGE = ("prompt_tokens", "total_tokens", "completion_tokens")
_NOT_FOUND = 404


class RustReply(TranslatedReply):
    """A reply that sends the answer of the chat, completions or token API as the Rust frontend would."""

    def _whole(self, status: int, value: dict[str, Any]) -> object:
        if status != 200:
            return _error(value["error"])
        if "request_id" in value:
            del value["usage"]
        return value

    def _events(self, data: bytes) -> Iterator[bytes]:
        if data == b"[DONE]":
            yield DONE
            return
        chunk: dict[str, Any] = json.loads(data)
        failed = "error" in chunk
        events: Iterable[object] = [_error(chunk["error"])] if failed else _written(chunk)
        for event in events:
            yield b"data: %b\n\n" % compact(event)


def _written(chunk: Mapping[str, Any]) -> Iterator[object]:
    """Yield the events for one of the Python frontend, which has one choice or none."""
    head = {name: chunk[name] for name in _HEAD if name in chunk}
    tail = {} if chunk.get("usage") is None else {"usage": _usage(chunk["usage"])}
    if not chunk["choices"]:
        yield head | {"choices": []} | tail
        return
    (choice,) = chunk["choices"]
    prompt = _without_nulls({"prompt_token_ids": chunk.get("prompt_token_ids")})
    if "request_id" in chunk:
        names = ("index", "logprobs", "finish_reason", "token_ids")
        said = {name: choice[name] for name in names if choice.get(name) is not None}
        yield head | {"choices": [said]} | tail | prompt
        return
    begun = choice.get("prompt_token_ids")
    if begun is not None:
        said = {"index": choice["index"], "text": "", "prompt_token_ids": begun}
        counts = {"usage": _usage({**chunk["usage"], "completion_tokens": 0})} if tail else {}
        yield head | {"choices": [said]} | counts
    said = _without_nulls(_said(choice))
    ended = choice.get("finish_reason") is not None
    if not ended or said.get("delta") or said.get("text") or said.get("token_ids"):
        yield head | {"choices": [said]} | tail | prompt
    if ended:
        empty: dict[str, object] = {"delta": {}} if "delta" in choice else {"text": ""}
        reasons = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
        yield (
            head
            | {"choices": [{"index": choice["index"], **empty, **_without_nulls(reasons)}]}
            | tail
        )


def _said(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice without the reasons for its end, and without what its first event has."""
    said: dict[str, Any] = {"index": choice["index"]}
    if "delta" in choice:
        delta = _without_nulls(choice["delta"])
        if "role" in delta:
            delta = {"role": delta["role"]}
        said["delta"] = delta
    else:
        said["text"] = choice["text"]
    return said | {name: choice.get(name) for name in ("logprobs", "token_ids")}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: usage[name] for name in _USAGE}
    counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
    return counts | {"prompt_tokens_details": usage.get("prompt_tokens_details")}


def _error(error: Mapping[str, Any]) -> object:
    kind = "invalid_request_error" if error["code"] < 500 else "server_error"
    found = error["code"] != _NOT_FOUND
    body = {"message": error["message"], "type": kind, "param": error.get("param")}
    return {"error": body | {"code": kind if found else "model_not_found"}}


def _without_nulls(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}
