"""The client's side of one request: the answer as it goes out, and what slows or ends it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from balanceroute.proxy.live.openai.answer import (
    STREAM_HEADERS,
    dump_compact,
    ended_events,
    ended_token_events,
    headers_of_refusal,
    message_events,
    passable_headers,
    stream_headers,
    write_events,
)
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import (
    CannotResumeError,
    continuable,
    continued_body,
    draws_otherwise,
    is_greedy,
    may_begin_again,
    resumed_members,
    sampling_of,
    says_again,
)
from balanceroute.proxy.live.openai.errors import (
    JSON_HEADERS,
    NEVER_AGAIN,
    answer_event,
    error_body,
    error_event,
    error_words,
)
from balanceroute.proxy.live.openai.shape import PROMPT, SAMPLING, Api, Shape, flag
from balanceroute.proxy.live.openai.stream_reader import RepeatedText
from balanceroute.proxy.live.openai.token_ids import (
    BackedUpIds,
    GeneratedIds,
    TokenIds,
    asks_logprobs,
    care_of,
)
from balanceroute.proxy.live.openai.told import Told, ToldChoices, ToldEvents
from balanceroute.proxy.live.openai.transcript import Logprobs, Transcript
from balanceroute.proxy.live.request.leg_settings import Resume

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.instances import FirstTokenTrust, Prefiller
    from balanceroute.proxy.live.openai.continuation import PrefillFirstToken
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers


# Signs of life: Anthropic's clients know events of that name; all others pass over comments.
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_COMMENT = b": keep-alive\n\n"


class ClientAnswer:
    """One answer; it keeps the record's status.

    Args:
        left: Called when the client is gone.
        slow: Called with whether the client reads too slowly, once that has changed.
    """

    __slots__ = ("_heard_s", "_record", "_slow", "_written", "is_paused", "opened", "reply")

    def __init__(
        self,
        reply: "Reply",
        record: "RequestRecord",
        *,
        left: "Callable[[], None]",
        slow: "Callable[[bool], None]",
    ) -> None:
        self.reply = reply
        # Whether the client has something of the answer; a comment is nothing of it.
        self.opened = False
        self.is_paused = False  # Whether the client reads too slowly at present.
        self._record = record
        self._written = reply.written
        self._heard_s = record.arrived_ns / 1e9  # When the client was first seen to have that much.
        self._slow: Callable[[bool], None] | None = slow
        reply.on_closed = left

    def open(self, status: int, headers: "Headers") -> None:
        self.opened = True
        self._record.status = status
        self.reply.on_pause = self._pause
        self.reply.on_resume = self._resume
        self.reply.start(status, [*stream_headers(headers), self._name])

    def comment(self, headers: "Headers", data: bytes) -> None:
        """Send what is no part of the answer; the first begins the stream, whatever comes of it."""
        if self.opened:
            self.reply.write(data)
        elif not self.reply.closed:
            self._record.status = 200
            self.reply.on_pause = self._pause
            self.reply.on_resume = self._resume
            self.reply.comment([*stream_headers(headers), self._name], data, self._late)

    def keep_alive(self, now_s: float, silence_s: float) -> None:
        """Send a sign of life if the client of a stream has had nothing for so long."""
        if self.reply.written == self._written:
            if now_s < self._heard_s + silence_s or self.reply.paused:
                return
            messages = self._record.endpoint == Api.MESSAGES.value
            self.comment(STREAM_HEADERS, _PING if messages else _COMMENT)
        self._written, self._heard_s = self.reply.written, now_s

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        self._record.status = 200 if self.reply.commented else status
        self.reply.send(status, [*passable_headers(headers), self._name], body)

    def pass_on(self, status: int, headers: "Headers", body: bytes) -> str:
        """Send an engine's own refusal; return what it says."""
        words = error_words(body)
        self.send(status, headers_of_refusal(status, headers), body)
        return f"the engine answered {status}" + (f": {words}" if words else "")

    def fail(
        self,
        status: int,
        reason: str,
        *,
        retry_after_s: int | None = None,
        for_good: bool = False,
    ) -> None:
        """Send an error: as an answer, or at the end of a stream that then breaks off.

        `for_good` says that the client is not to try again.
        """
        if self.opened:
            self.reply.write(error_event(status, reason, endpoint=self._record.endpoint))
            self.reply.abort()
            return
        headers = list(JSON_HEADERS)
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        if for_good:
            headers.append(NEVER_AGAIN)
        self.send(status, headers, error_body(status, reason, endpoint=self._record.endpoint))

    def forget(self) -> None:
        self.reply.on_closed = self.reply.on_pause = self.reply.on_resume = None
        self._slow = None  # Leave no cycle behind.

    def _pause(self) -> None:
        self.is_paused = True
        if self._slow is not None:
            self._slow(True)

    def _resume(self) -> None:
        self.is_paused = False
        if self._slow is not None:
            self._slow(False)

    def _late(self, status: int, body: bytes) -> bytes:
        return answer_event(status, body, error_words(body), endpoint=self._record.endpoint)

    @property
    def _name(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._record.request_id.encode()


# What a request emitted on earlier bindings, for it to go on from there.


_NAMED = frozenset({Api.MESSAGES, Api.RESPONSES})


class Emitted(Struct, eq=False):
    """All that the client has of an answer which its rank did not end."""

    tokens: int = 0  # How many.
    # The first token, until a rank has said more than it; None if it waits for a rank.
    early: "EarlyToken | None" = None
    drawn: "Mapping[str, object]" = {}  # Members that no client gave: the seed.
    members: "Mapping[str, object]" = {}  # Of the client's body, those that change, and these.
    # Of the client's body, what a continuation from ids needs; None if there can be none.
    kept: "Mapping[str, Any] | None" = None
    # The request that continues from ids, in place of the client's; None if none does.
    continued: RequestBody | None = None
    overlap: str = ""  # Text that the client has behind `tokens`, and that comes again.
    # Tokens behind them of which it has log-probabilities, which come again.
    overlap_tokens: int = 0
    text_offset: int = 0  # Of the first token behind them, as log-probabilities tell it.
    head: bytes = b""  # Of the client's first event, all that stands before the choices.
    # What the client has of an answer that is to begin again; None if none does.
    told: Told | None = None
    # When the client had something last, by the loop's clock; None if it has nothing.
    heard_s: float | None = None
    parses: bool = False  # Whether a prefiller has shown that it has a parser of reasoning.
    _text: str = ""

    def repeated(self) -> RepeatedText:
        """Return what the client has, and that the next rank says again."""
        return RepeatedText(self.overlap, self.overlap_tokens)

    @property
    def comparison(self) -> "Callable[[bytes], bool] | None":
        """See `EarlyToken`."""
        return None if self.early is None else self.early.comparison

    @property
    def logprobs(self) -> Logprobs | None:
        """How log-probabilities go on; None if there are none."""
        if self.kept is None or not asks_logprobs(self.kept):
            return None
        return Logprobs(self.text_offset, self.kept.get("top_logprobs") or 0)

    def add(
        self, transcript: "Transcript", tokens: int, shape: "Shape", body: "RequestBody"
    ) -> bool:
        """Take in the text and tokens of a leg; return whether there is any text to go on from.

        Raises:
            CannotResumeError: The answer cannot be continued from text.
        """
        if transcript.text is None or self.continued is not None:
            raise CannotResumeError("its answer cannot be continued from text")
        values = body.large_values()
        told = asks_logprobs(values) or values.get("return_token_ids")
        if told and transcript.text and not transcript.is_whole:
            # The next rank would say these tokens again, and the client has them.
            raise CannotResumeError("tokens that the client was told of may have no text yet")
        text, tokens = self._text + "".join(transcript.text), self.tokens + tokens
        if not text:
            return False
        members = resumed_members(shape.api, values, text, tokens)
        self.members = {**self.drawn, **members}
        self._text, self.tokens = text, tokens
        self.overlap, self.overlap_tokens = "", 0
        return True

    def ids_to_keep(
        self,
        shape: "Shape",
        body: "RequestBody",
        resume: Resume,
        repeated: RepeatedText,
        *,
        parses: bool,
        prompt_tokens: int | None,
    ) -> TokenIds | None:
        """Return what keeps the ids of a rank's tokens, for another to go on from; None for nothing.

        Args:
            shape: The client's request.
            body: What the rank is asked.
            resume: Which streams go on; some do.
            repeated: What the client has, and that the rank says again.
            parses: Whether the rank may have a parser of reasoning: what that keeps back no answer tells.
            prompt_tokens: Of the client's prompt, as a prefiller has counted; None if none has.
        """
        if self.continued is None:
            self.kept = continuable(shape, body.values, sampled=resume is Resume.VALID)
            parses = (parses or self.parses) and shape.api is Api.CHAT
        if self.kept is None or (parses and self.continued is None):
            return None
        if shape.api is Api.GENERATE:
            return GeneratedIds(bytes(body.value_text(PROMPT)))
        care = care_of(self.kept)
        if prompt_tokens is not None:
            prompt_tokens += self.tokens
        if care is None:
            return TokenIds(repeated, prompt_tokens)
        return BackedUpIds(care, repeated, prompt_tokens)

    def told_to_keep(
        self,
        shape: "Shape",
        body: "RequestBody",
        resume: Resume,
        seed: "Callable[[], int]",
    ) -> Told | None:
        """Return what keeps all that the client of a stream gets, for another engine to begin again.

        Args:
            shape: The client's request, of which it has nothing yet.
            body: What it sent.
            resume: Which streams go on; some do.
            seed: Draws one.

        Returns:
            None if the answer must not begin again.
        """
        if self.continued is not None or self.tokens:
            return None
        sampling = may_begin_again(shape, body.values, sampled=resume is Resume.VALID)
        if sampling is None:
            return None
        if not self.drawn and draws_otherwise(sampling):
            self.draw(sampling, seed(), nested=shape.api is Api.GENERATE)
        self.told = ToldEvents() if shape.api in _NAMED else ToldChoices()
        return self.told

    def draw(self, sampling: "Mapping[str, Any]", seed: int, *, nested: bool) -> None:
        """Give the request a seed, for its tokens to be drawn alike wherever they are.

        `nested` says that the members of `sampling` are not the body's own.
        """
        drawn: dict[str, object] = {"seed": seed}
        self.drawn = {SAMPLING: {**sampling, **drawn}} if nested else drawn
        self.members = {**self.members, **self.drawn}

    def takes(self, ids: "TokenIds", shape: "Shape") -> bool:
        """Return whether the answer can be continued from the ids of a leg's tokens."""
        if self.continued is not None and not ids.begun:
            return True  # It did nothing, and what it was asked for stands.
        tokens = self.tokens + ids.count
        # A parser of reasoning may have kept a chat's first tokens back.
        begun = tokens > 0 or ids.behind or shape.api is Api.COMPLETIONS
        # Another sample would not say again what the client has.
        repeats = self.kept is not None and is_greedy(self.kept)
        if not repeats and (ids.behind or ids.tokens_behind):
            return False
        ends = shape.max_tokens is not None and tokens >= shape.max_tokens
        return ids.usable and bool(begun) and not ends

    def add_ids(self, ids: "TokenIds", shape: "Shape") -> None:
        """Take in the ids of a leg's tokens, if `takes`."""
        assert self.kept is not None
        if not ids.begun:
            return
        self.tokens += ids.count
        self.overlap, self.overlap_tokens = ids.behind, ids.tokens_behind
        self.text_offset += ids.end
        self.head = self.head or ids.head
        self._continue(b",".join(filter(None, (ids.prompt, ids.kept))), shape)

    def add_early(self, shape: "Shape") -> None:
        """Take in the first token, behind which a rank said something else than the client has."""
        assert self.early is not None
        assert self.early.said is not None
        self.early.take_back()
        self.kept, said = self.early.kept, self.early.said
        self.tokens, self.overlap, self.head = 1, "", said.head
        self._continue(said.ids, shape)

    def _continue(self, ids: bytes, shape: "Shape") -> None:
        assert self.kept is not None
        self.early, self.members = None, {}
        kept = {**self.kept, **self.drawn}
        self.continued = RequestBody(continued_body(kept, shape.api, ids, self.tokens))


# The first token of a stream, given to the client when the prefill ends, before there is a rank.
#
# The decode leg stays as it is: the rank says the token again, which is left out. For both to
# draw the same token, both legs have one seed. Until the rank has said more than the client has,
# all of it can be repeated, as before the first byte. If it says something else, the answer goes
# on behind the client's token, from ids.
#
# Of a prefiller on probation the client gets nothing: what it says is compared with what the rank
# says.


class EarlyToken:
    """The first token of one request."""

    __slots__ = ("_doubted", "_firsts", "_prefiller", "kept", "members", "min_tokens", "said")

    def __init__(self, kept: "Mapping[str, Any]") -> None:
        sampling = sampling_of(kept)
        self.kept = kept  # Members of the client's body that a continuation has.
        # Where the sampling has a place of its own, the answer is ids.
        # What the prefill leg is asked for beyond those of both legs.
        self.members = {"return_token_ids": True} if sampling is kept else {}
        # An answer may be empty, and then the prefiller has to say so, too.
        # How many the prefill leg must not end before.
        self.min_tokens = 1 if sampling.get("min_tokens") else 0
        self.said: PrefillFirstToken | None = None  # What the client has; None if it has nothing.
        self._doubted: PrefillFirstToken | None = None
        self._prefiller = ""
        self._firsts: FirstTokenTrust | None = None

    @property
    def comparison(self) -> "Callable[[bytes], bool] | None":
        """What compares each event of a rank's stream until it is true; None if nothing is to be."""
        if self._doubted is None:
            return None
        return partial(self._compare, self._doubted, RepeatedText(self._doubted.text))

    def give(self, said: "PrefillFirstToken", prefiller: "Prefiller") -> None:
        self.said, self._doubted = said, None
        self._firsts, self._prefiller = prefiller.first_tokens, prefiller.name
        self._firsts.count()

    def doubt(self, said: "PrefillFirstToken", prefiller: "Prefiller") -> None:
        """Note what a prefiller said, for a rank to say it first."""
        self._doubted = said
        self._firsts, self._prefiller = prefiller.first_tokens, prefiller.name

    def take_back(self) -> None:
        """Note that the rank said another one."""
        if self._firsts is not None:
            self._firsts.differ(self._prefiller)

    def _compare(self, said: "PrefillFirstToken", left: RepeatedText, event: bytes) -> bool:
        same = says_again(said, left, event)
        if same is None or self._firsts is None:
            return False
        self._doubted = None  # Another rank is no other comparison.
        self._firsts.count()
        if same:
            self._firsts.agree()
        else:
            self.take_back()
        return True


# The answer of a prefiller that met a stop condition on its one token, as the client wants it.
#
# Nothing is left to decode then, and there is no KV cache to pull: the prefiller's answer is the
# answer. A client that asked for a stream gets the same events that a decode engine would have
# sent.


_PARAMS = "kv_transfer_params"


def answer_shortly(
    client: "ClientAnswer", shape: "Shape", body: "RequestBody", message: Mapping[str, Any]
) -> None:
    """Send the prefiller's answer to the client, as a stream if it asked for one."""
    if shape.api is Api.MESSAGES:  # vLLM leaves out there what is null.
        message = {name: value for name, value in message.items() if name != _PARAMS}
        if not shape.stream:
            client.send(200, JSON_HEADERS, dump_compact(message))
            return
        client.open(200, STREAM_HEADERS)
        client.reply.write(message_events(message))
        client.reply.end()
        return
    if not shape.stream:
        client.send(200, JSON_HEADERS, short_answer_body(message))
        return
    options = body.values.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    client.open(200, STREAM_HEADERS)
    ids = flag(body.values.get("return_token_ids")) is True
    events = short_answer_events(shape.api, message, include_usage=usage, shows_ids=ids)
    client.reply.write(events)
    client.reply.end()


def short_answer_body(message: Mapping[str, Any]) -> bytes:
    """Return the prefiller's answer as that to a request that is not streamed."""
    return dump_compact({**message, _PARAMS: None})


def short_answer_events(
    api: Api, message: Mapping[str, Any], *, include_usage: bool, shows_ids: bool = False
) -> bytes:
    """Return the prefiller's answer as server-sent events; `shows_ids`: with the ids that it tells."""
    if api is Api.GENERATE:
        events = ended_token_events(message, include_usage=include_usage)
    else:
        events = ended_events(api, message, include_usage=include_usage, shows_ids=shows_ids)
    return write_events(events) + b"data: [DONE]\n\n"
