"""A client that receives an engine's stream through a relay, and the events that the engine sends."""

import json
from typing import TYPE_CHECKING, Any, cast

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.completion_stream import CompletionStream
from balanceroute.proxy.live.openai.named_events import NamedEventStream
from balanceroute.proxy.live.openai.shape import Api, read_shape
from balanceroute.proxy.live.openai.token_counts import (
    CountsAsked,
    PromptUsage,
    TokenCounts,
    UsageRewrite,
    ask_for_counts,
)
from balanceroute.proxy.live.openai.token_ids import TokenIds
from balanceroute.proxy.live.openai.transcript import Transcript
from balanceroute.proxy.live.request.client_answer import Emitted
from balanceroute.proxy.live.request.relay import Relay
from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.pump import EventForm, Lent
    from balanceroute.proxy.wire.http1.server import Reply

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"
ALL = {"include_usage": True, "continuous_usage_stats": True}
TOTAL = {"include_usage": True}


class FakeLent:
    """What stands for a stream that is away."""

    def __init__(self) -> None:
        self.tokens = self.caught_up = self.stopped = 0
        self.paused = False

    def catch_up(self) -> None:
        self.caught_up += 1

    def stop(self) -> None:
        self.stopped += 1


class Client:
    """An owner and the client's reply in one: what came, in order."""

    def __init__(
        self,
        *,
        openai: bool = True,
        sequences: int = 1,
        cached_tokens: int | None = None,
        resumed_tokens: int = 0,
        keep_text: bool = False,
        counts: TokenCounts | None = None,
        asks_total: bool = False,
        ids: TokenIds | None = None,
        lends: bool = False,
    ) -> None:
        self.now_s = 100.0
        self.may_abort = False
        self.gaps: list[float] = []
        self.turns: list[str] = []
        self.pieces: list[bytes] = []
        self.refusals: list[tuple[int, Headers, bytes]] = []
        self.errors: list[WireError] = []
        self.first_errors: list[bytes] = []
        self.forms: list[EventForm] = []
        self.lent: FakeLent | None = None
        resumes = resumed_tokens > 0
        prompt = None if cached_tokens is None else PromptUsage(cached_tokens)
        self.usage = UsageRewrite(prompt, resumed_tokens)
        self.transcript = Transcript(sequences)
        self.reader: CompletionStream | NamedEventStream
        if openai:
            self.reader = CompletionStream(
                sequences,
                resumes=resumes,
                usage=self.usage,
                asks_total=asks_total,
                counts=counts,
                transcript=self.transcript if keep_text else None,
                ids=ids,
                may_abort=lambda: self.may_abort,
                expensive=lambda: self.turns.append("expensive"),
            )
        else:
            self.reader = NamedEventStream(
                resumes=resumes, usage=self.usage, hands_back=keep_text, may_abort=lambda: True
            )
        self.leg = Relay(
            self,
            cast("Reply", self),
            self.reader,
            lambda: self.now_s,
            observe_gap=self.gaps.append,
            resumes=resumes,
            emitted=Emitted(tokens=resumed_tokens),
            lends=lends,
        )

    def answer(self, *pieces: bytes, status: int = 200, headers: Headers = SSE) -> "Client":
        """Let the engine answer with these pieces, each a chunk of its own, and not yet end."""
        self.leg.on_head(status, headers)
        for piece in pieces:
            # As a connection does it.
            line = ChunkedDecoder().take_line(b"%x\r\n%b\r\n" % (len(piece), piece))
            if line and self.leg.takes_lines:
                self.leg.on_line(line)
            else:
                self.leg.on_data(piece)
        return self

    def end(self) -> "Client":
        self.leg.on_end()
        return self

    @property
    def tokens(self) -> int:
        return self.reader.read_tokens()

    @property
    def finished(self) -> int:
        assert isinstance(self.reader, CompletionStream)
        return self.reader.finished

    @property
    def usage_tokens(self) -> int | None:
        return self.reader.usage_tokens

    @property
    def text(self) -> list[str] | None:
        return self.transcript.text

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)

    # Reply.

    def write(self, data: bytes) -> None:
        assert "started" in self.turns
        assert data
        self.turns.append("wrote")
        self.pieces.append(data)

    # StreamEvents.

    def decode_refused(self, status: int, headers: Headers, body: bytes) -> None:
        self.turns.append("refused")
        self.refusals.append((status, headers, body))

    def stream_remarked(self, headers: Headers, event: bytes) -> None:
        assert headers == SSE
        self.turns.append("remarked")
        self.pieces.append(event)

    def stream_started(self, status: int, headers: Headers) -> None:
        assert (status, headers) == (200, SSE)
        self.turns.append("started")

    def stream_error_first(self, event: bytes) -> None:
        self.turns.append("error first")
        self.first_errors.append(event)

    def stream_aborted(self) -> None:
        self.turns.append("aborted")

    def stream_recomputed(self) -> None:
        self.turns.append("recomputed")

    def stream_unreadable(self, reason: str) -> None:
        self.turns.append(f"unreadable: {reason}")

    def stream_ended(self) -> None:
        self.turns.append("ended")

    def stream_error(self, message: str, *, cut: bool = False) -> None:
        self.turns.append(f"error{' cut' * cut}: {message}")

    def stream_broken(self, error: WireError) -> None:
        self.turns.append("broken")
        self.errors.append(error)

    def stream_cut(self, error: WireError) -> None:
        self.turns.append("cut")
        self.errors.append(error)

    def stream_waits(self, form: "EventForm") -> "Lent | None":
        self.forms.append(form)
        return cast("Lent | None", self.lent)

    def stream_back(self, lent: "Lent") -> None:
        assert lent is cast("Lent | None", self.lent)
        self.turns.append("back")


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps(members, separators=(",", ":")).encode() + b"\n\n"


def chat(text: str = "a", finish: str | None = None, **members: Any) -> bytes:
    """Return an event as vLLM writes it."""
    end = {"finish_reason": finish} if finish is None else {"finish_reason": finish} | members
    more = members if finish is None else {}
    choice = {"index": 0, "delta": {"content": text} | more, "logprobs": None} | end
    return event(object="chat.completion.chunk", choices=[choice])


def completion(text: str = "a", finish: str | None = None, stop: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return event(object="text_completion", choices=[choice | {"stop_reason": stop}])


OPENING = event(
    choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
)
LAST = chat("z", "stop", stop_reason=None)
ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
GONE = WireError(WireFault.RESET, "gone", sent=True, answered=True)
RECOMPUTED = completion("", "stop", "recomputed")


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


# With the engine's own counts.


def asked(
    options: object = None, api: Api = Api.CHAT, *, each: bool = True, **more: Any
) -> CountsAsked | None:
    values = {"messages": [], "prompt": "a", "stream": True, "stream_options": options} | more
    body = RequestBody(json.dumps(values).encode())
    return ask_for_counts(read_shape(api, body, max_sequences=8), body.values, each=each)


def counts(options: object = None, *, each: bool = True) -> TokenCounts:
    wanted = asked(options, each=each)
    assert wanted is not None
    return TokenCounts(wanted)


def chunk(text: str = "a", finish: str | None = None, **more: Any) -> bytes:
    ends = {} if finish is None else {"stop_reason": None}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish} | ends
    return event(object="text_completion", choices=[choice], **more)


def usage(tokens: int, **more: object) -> dict[str, Any]:
    return {
        "usage": {"prompt_tokens": 9, "total_tokens": 9 + tokens, "completion_tokens": tokens}
        | more
    }


def total(tokens: int, **more: Any) -> bytes:
    return event(object="text_completion", choices=[], **usage(tokens), **more)
