"""One replayed request on the wire: from the connection's callbacks to the recorder's samples."""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.lab.replay.figures import (
    ERROR_EVENT,
    MALFORMED_EVENT,
    SHORT_STREAM,
    TIMEOUT,
    ReplayFault,
    ReplayRecorder,
    RequestSample,
    error_message,
    from_status,
    from_wire,
    shown,
)
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import (
    Caller,
    Calling,
    Headers,
    WireError,
    bracketed,
    first_value,
)
from balanceroute.proxy.wire.sse import EventScanner, event_data

# Parsing a streamed answer: how many tokens each piece has, and whether the answer is complete.
#
# Sans-IO: bytes in, counts out. A *token event* is an event whose choice carries output: text
# (even an empty one, for a token may be half a character), reasoning or a tool call. An event
# that only names the role, the last one of some servers that only gives the reason to finish, and
# the one with the usage are none. Without speculative decoding and stream intervals a token event
# is one token; what the engine counted itself is in `completion_tokens`.
#
# An answer is complete if a choice has a finish reason and `[DONE]` arrived. Engines report a
# failure after the head of the answer as an event `{"error": ...}`.
#
# The streams of messages and responses have events with a `type`: of these, the pieces of text,
# of thoughts and of calls are token events, and the last one ends the answer, without `[DONE]`.

# The last events of messages and responses.
_LAST = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
# Finish reasons of engines that failed to serve the request.
_GIVEN_UP = frozenset({"abort", "error", "failed", "cancelled"})
# A message counts the cached tokens of the prompt beside the rest.
_INPUT_TOKENS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class AnswerReader:
    __slots__ = (
        "_done",
        "_scanner",
        "completion_tokens",
        "fault",
        "finish_reason",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.fault: ReplayFault | None = None  # Why the answer failed; None so far.
        self.prompt_tokens: int | None = None  # The engine's count; None before its usage arrived.
        # The engine's count; None before its usage arrived.
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None  # The first choice's; None before it arrived.
        self._scanner = EventScanner()
        self._done = False

    def feed(self, data: bytes) -> int:
        """Return how many token events a piece of the answer completes.

        Raises:
            WireError: An event is too large.
        """
        tokens = 0
        for event in self._scanner.feed(data):
            if _plainly_a_token(event):
                tokens += 1
            else:
                tokens += self._read(event)
        return tokens

    def end(self) -> ReplayFault | None:
        """Note the end of the stream; return why the answer failed, None if it is complete."""
        parts = {"a finish_reason": self.finish_reason is not None, "[DONE]": self._done}
        missing = [part for part, came in parts.items() if not came]
        if missing:
            tail = self._scanner.tail.decode(errors="replace")
            rest = f", with {tail!r} left over" if tail else ""
            self._fail(SHORT_STREAM, f"the answer ended without {' and '.join(missing)}{rest}")
        return self.fault

    def _read(self, event: bytes) -> int:
        data = event_data(event)
        if not data:  # A comment that keeps the connection alive.
            return 0
        if data == b"[DONE]":
            self._done = True
            return 0
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            self._fail(MALFORMED_EVENT, f"not a JSON object: {data.decode(errors='replace')}")
            return 0
        message = error_message(chunk)
        if message is not None:
            self._fail(ERROR_EVENT, message)
            return 0
        kind = chunk.get("type")
        if isinstance(kind, str):
            return self._read_named(kind, chunk)
        self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        return self._read_choices(choices) if isinstance(choices, list) else 0

    def _read_named(self, kind: str, event: dict[str, object]) -> int:
        delta, response = event.get("delta"), event.get("response")
        usage = event.get("usage")
        if isinstance(response, dict):
            usage = response.get("usage")
        if isinstance(usage, dict):
            output = usage.get("output_tokens")
            counts = [usage.get(name) for name in _INPUT_TOKENS]
            self.completion_tokens = output if isinstance(output, int) else None
            self.prompt_tokens = sum(one for one in counts if isinstance(one, int))
        if kind == "message_delta" and isinstance(delta, dict):
            reason = delta.get("stop_reason")
            self.finish_reason = reason if isinstance(reason, str) else "abort"
        if kind in _LAST:
            self._done = True
            if isinstance(response, dict):
                self.finish_reason = str(response.get("status"))
            if self.finish_reason in _GIVEN_UP:
                self._fail(ERROR_EVENT, f"{kind} says {self.finish_reason}")
        if isinstance(delta, dict):
            return kind == "content_block_delta" and delta.get("type") != "signature_delta"
        return isinstance(delta, str)

    def _read_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(prompt, int):
                self.prompt_tokens = prompt
            if isinstance(completion, int):
                self.completion_tokens = completion

    def _read_choices(self, choices: list[object]) -> int:
        tokens = 0
        for choice in choices:
            if not isinstance(choice, dict):
                self._fail(MALFORMED_EVENT, f"a choice is not an object: {choice}")
                continue
            tokens += _has_output(choice)
            reason = choice.get("finish_reason")
            if isinstance(reason, str):
                self.finish_reason = reason
                if reason in _GIVEN_UP:
                    self._fail(ERROR_EVENT, f"finish_reason is {reason}")
        return tokens

    def _fail(self, kind: str, message: str) -> None:
        # The first failure is the cause of those that follow.
        if self.fault is None:
            self.fault = ReplayFault(kind, shown(message))


def _plainly_a_token(event: bytes) -> bool:
    """Return whether an event is vLLM's usual token event, by a few searches instead of JSON.

    No text of the model can contain these keys: its quotation marks are escaped.
    """
    return (
        b'"finish_reason":null' in event
        and (b'"content":"' in event or b'"text":"' in event)
        and b'"role"' not in event
        and b'"usage":{' not in event
        and b'"error"' not in event
    )


def _has_output(choice: dict[str, object]) -> bool:
    if "text" in choice:
        return isinstance(choice["text"], str)
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    parts = [
        delta[key]
        for key in ("content", "reasoning", "reasoning_content", "tool_calls")
        if delta.get(key) is not None
    ]
    # With the role an empty text only marks the beginning of the answer.
    return any(parts) if "role" in delta else bool(parts)


# The part of an error's body that is kept for the message.
_ERROR_BYTES = 4096


class ReplayExchange:
    """One request in flight; the connection calls `on_head`, `on_data`, and `on_end` or `on_error`.

    `on_over` is called once when the request has ended, but not when it is cancelled.
    """

    __slots__ = (
        "_answer",
        "_call",
        "_clock_ns",
        "_loop",
        "_on_over",
        "_recorder",
        "_refusal",
        "_status",
        "_timer",
        "sample",
    )
    _call: Calling
    _timer: asyncio.TimerHandle

    def __init__(
        self,
        sample: RequestSample,
        recorder: ReplayRecorder,
        loop: asyncio.AbstractEventLoop,
        *,
        clock_ns: Callable[[], int],
        on_over: Callable[[], None],
    ) -> None:
        self.sample = sample
        self._recorder = recorder
        self._loop = loop
        self._clock_ns = clock_ns
        self._on_over = on_over
        self._answer = AnswerReader()
        self._status = 0
        self._refusal = bytearray()

    def start(
        self, endpoint: Caller, target: bytes, headers: Headers, body: bytes, *, timeout_s: float
    ) -> None:
        """Send the request; its answer must be complete within some real seconds."""
        self._call = endpoint.request(b"POST", target, headers, body, self)
        self._timer = self._loop.call_later(timeout_s, self._time_out)

    def cancel(self) -> None:
        self._timer.cancel()
        self._call.abort()
        self._recorder.cancel(self.sample, self._clock_ns())

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        retry_after = first_value(headers, b"retry-after")
        if retry_after is not None:
            self.sample.retry_after = shown(retry_after.decode("latin-1"))

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            self._refusal += data[: _ERROR_BYTES - len(self._refusal)]
            return
        try:
            tokens = self._answer.feed(data)
        except WireError as error:
            self._call.abort()
            self._fail(from_wire(error))
            return
        if tokens:
            self._recorder.tokens(self.sample, tokens, self._clock_ns())

    def on_end(self) -> None:
        if self._status != 200:
            self._fail(from_status(self._status, bytes(self._refusal)))
            return
        answer = self._answer
        fault = answer.end()
        if fault is not None:
            self._fail(fault)
            return
        self._timer.cancel()
        self._recorder.finish(
            self.sample,
            self._clock_ns(),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
        )
        self._on_over()

    def on_error(self, error: WireError) -> None:
        # An error event with the cause arrived before the connection broke.
        self._fail(self._answer.fault or from_wire(error))

    def _time_out(self) -> None:
        self._call.abort()
        events = self.sample.events
        fault = ReplayFault(TIMEOUT, f"no whole answer in time, {events} token events so far")
        self._fail(self._answer.fault or fault)

    def _fail(self, fault: ReplayFault) -> None:
        self._timer.cancel()
        self._recorder.fail(self.sample, self._clock_ns(), fault)
        self._on_over()


_FETCH_TIMEOUT_S = 30.0
_FETCH_BYTES = 1 << 20


class TargetError(BalanceRouteError):
    """The target's answer is not the expected one; the message has its URL."""


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    url: str
    host: str  # A name or an address, without brackets.
    port: int
    tls: bool  # Whether to use TLS, verified with the system's authorities.
    prefix: str  # Comes before every path, without the last slash.

    def connect(self, *, http3: bool = False) -> Caller:
        """Return a caller for it, over HTTP/1.1 or one connection of HTTP/3 (the extra `h3`)."""
        if http3:
            # Here, so that nothing of it is loaded without the flag: an extra.
            from balanceroute.proxy.wire.http3.client import Http3Endpoint  # noqa: PLC0415

            return Http3Endpoint(self.host, self.port)
        context = ssl.create_default_context() if self.tls else None
        host = bracketed(self.host)
        default = 443 if self.tls else 80
        header = host if self.port == default else f"{host}:{self.port}"
        return Endpoint(self.host, self.port, ssl=context, host_header=header.encode())

    def path(self, path: str) -> bytes:
        """Return the request target of a path of the API, such as `/v1/models`."""
        return f"{self.prefix}{path}".encode()


def parse_target(flag: str, url: str) -> ReplayTarget:
    """Parse a URL; a final `/v1` is removed, since the paths of the API begin with it.

    Args:
        flag: The flag that has it, for the message.
        url: `http://host:port` or `https://host:port`, the port may be left out.

    Raises:
        ConfigError: Not such a URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag}: {url!r} is not a URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"{flag}: {url!r} is not of the form http://host:port")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{flag}: {url!r} has more than scheme, host, port and path")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{flag}: {url!r} has characters that a URL cannot hold")
    tls = parts.scheme == "https"
    return ReplayTarget(
        url=url,
        host=parts.hostname,
        port=port or (443 if tls else 80),
        tls=tls,
        prefix=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
    )


async def call_json(
    endpoint: Caller,
    target: ReplayTarget,
    method: str,
    path: str,
    headers: Headers,
    *,
    body: bytes = b"",
) -> object:
    """Return the JSON value that a path answers.

    Raises:
        TargetError: The answer is not 200 or not JSON.
        WireError: There is no answer.
    """
    response = await fetch(
        endpoint,
        method.encode(),
        target.path(path),
        headers,
        body,
        timeout_s=_FETCH_TIMEOUT_S,
        max_bytes=_FETCH_BYTES,
    )
    if response.status != 200:
        fault = from_status(response.status, response.body)
        raise TargetError(f"{method} {target.url}{path}: {fault.kind}: {fault.message}")
    try:
        value: object = json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise TargetError(f"{method} {target.url}{path}: the answer is not JSON") from error
    return value


async def first_model(endpoint: Caller, target: ReplayTarget, headers: Headers) -> str:
    """Return the name of the first model that the target serves.

    Raises:
        TargetError: The target names no model.
        WireError: There is no answer.
    """
    answer = await call_json(endpoint, target, "GET", "/v1/models", headers)
    models = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(models, list) and models and isinstance(models[0], dict):
        name = models[0].get("id")
        if isinstance(name, str):
            return name
    raise TargetError(f"GET {target.url}/v1/models: no model in the answer: name one with --model")
