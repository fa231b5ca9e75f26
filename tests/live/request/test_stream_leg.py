"""The stream from a decode engine: every byte of it, every token counted, no end that is not true."""

import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.live.openai.token_counts import TokenCounts
from balanceroute.proxy.live.request.stream_leg import StreamLeg
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.server import Reply

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"
# name: sequences, content events, completion tokens by the usage object.
STREAMS: dict[str, tuple[int, int, int | None]] = {
    "chat_tools_named_stream": (1, 30, None),
    "mooncake_decode_before_prefill": (1, 6, None),
    "nixl_chat_stream_usage_decode": (1, 13, 24),
    "nixl_pd_cmpl_stream_n2": (2, 16, None),
    "solo_chat_stream": (1, 8, None),
    "solo_chat_stream_logprobs": (1, 8, None),
    "solo_chat_stream_n2": (2, 16, None),
    "solo_chat_stream_tokenids": (1, 8, None),
    "solo_chat_stream_usage": (1, 8, 8),
    "solo_chat_stream_usage_continuous": (1, 8, 8),
    "solo_cmpl_batch_stream": (2, 8, None),
    "solo_cmpl_stream_usage": (1, 8, 8),
}


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
    ) -> None:
        self.now_s = 100.0
        self.gaps: list[float] = []
        self.turns: list[str] = []
        self.pieces: list[bytes] = []
        self.refusals: list[tuple[int, Headers, bytes]] = []
        self.errors: list[WireError] = []
        self.first_errors: list[bytes] = []
        self.leg = StreamLeg(
            self,
            cast("Reply", self),
            lambda: self.now_s,
            openai=openai,
            sequences=sequences,
            cached_tokens=cached_tokens,
            resumed_tokens=resumed_tokens,
            keep_text=keep_text,
            observe_gap=self.gaps.append,
            counts=counts,
        )

    def answer(self, *pieces: bytes, status: int = 200, headers: Headers = SSE) -> "Client":
        """Let the engine answer with these pieces, and not yet end."""
        self.leg.on_head(status, headers)
        for piece in pieces:
            self.leg.on_data(piece)
        return self

    def end(self) -> "Client":
        self.leg.on_end()
        return self

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)

    # Reply.

    def write(self, data: bytes) -> None:
        assert "started" in self.turns
        assert data
        self.turns.append("wrote")
        self.pieces.append(data)

    # StreamOwner.

    def decode_refused(self, status: int, headers: Headers, body: bytes) -> None:
        self.turns.append("refused")
        self.refusals.append((status, headers, body))

    def stream_started(self, status: int, headers: Headers) -> None:
        assert (status, headers) == (200, SSE)
        self.turns.append("started")

    def stream_error_first(self, event: bytes) -> None:
        self.turns.append("error first")
        self.first_errors.append(event)

    def stream_counts_dear(self) -> None:
        self.turns.append("dear")

    def stream_recomputed(self) -> None:
        self.turns.append("recomputed")

    def stream_ended(self) -> None:
        self.turns.append("ended")

    def stream_error(self, message: str) -> None:
        self.turns.append(f"error: {message}")

    def stream_broken(self, error: WireError) -> None:
        self.turns.append("broken")
        self.errors.append(error)


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
RECOMPUTED = completion("", "stop", "recomputed")


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


# Real streams.


def check_real(name: str, body: bytes, pieces: Iterable[bytes], **options: Any) -> Client:
    sequences, tokens, counted = STREAMS[name]
    client = Client(sequences=sequences, **options).answer(*pieces)
    assert client.leg.finished == sequences
    client.end()
    assert client.received == body
    assert client.turns[0] == "started"
    assert client.turns[-1] == "ended"
    assert set(client.turns[1:-1]) == {"wrote"}
    assert client.leg.tokens == tokens
    assert client.leg.usage_tokens == counted
    return client


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 239, 1_000, 100_000])
def test_a_real_stream_reaches_the_client_byte_for_byte(
    body_of: Callable[[str], bytes], name: str, size: int
) -> None:
    body = body_of(f"{name}.resp")
    check_real(name, body, in_pieces(body, size))


@pytest.mark.parametrize("name", ["mooncake_decode_before_prefill", "solo_chat_stream_usage"])
def test_it_does_not_matter_where_a_stream_is_split(
    body_of: Callable[[str], bytes], name: str
) -> None:
    body = body_of(f"{name}.resp")
    for at in range(1, len(body)):
        check_real(name, body, [body[:at], body[at:]])


@pytest.mark.parametrize("name", STREAMS)
def test_a_real_stream_is_the_same_when_its_text_is_kept(
    body_of: Callable[[str], bytes], name: str
) -> None:
    body = body_of(f"{name}.resp")
    client = check_real(name, body, re.findall(rb"data: .*\n\n", body), keep_text=True)
    if STREAMS[name][0] > 1 or "tools" in name:
        assert client.leg.text is None
    else:
        text = "".join(
            choice.get("delta", choice).get("content", choice.get("text", ""))
            for line in re.findall(rb"data: (\{.*)", body)
            for choice in json.loads(line)["choices"]
        )
        assert client.leg.text is not None
        assert "".join(client.leg.text) == text


@given(st.lists(st.integers(1, 300), max_size=60), st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_stream_in_other_line_ends_is_the_same_in_any_pieces(
    sizes: list[int], line_end: str
) -> None:
    plain = OPENING + b": ping\n\n" + chat() * 7 + b"event: x\nid: 1\n" + LAST + DONE
    body = plain.replace(b"\n", line_end.encode())
    pieces = []
    at = 0
    for size in sizes:
        pieces.append(body[at : at + size])
        at += size
    # What follows is not part of the answer; it shows a lone CR for the end that it is.
    client = Client().answer(*filter(None, [*pieces, body[at:]]), b": end\n\n").end()
    assert client.received == body + b": end\n\n"
    assert client.turns[-1] == "ended"
    assert client.leg.tokens == 8


def test_a_client_has_only_whole_events_whenever_a_stream_breaks_off(
    body_of: Callable[[str], bytes],
) -> None:
    body = body_of("nixl_pd_client_disconnect.resp")
    for at in range(len(body)):
        client = Client().answer(*filter(None, [body[:at]])).end()
        whole = body[: body.rfind(b"\n\n", 0, at) + 2] if b"\n\n" in body[:at] else b""
        assert client.received == whole
        assert client.turns[-1] == "broken"
        assert client.errors[0].kind is WireFault.RESET


# Starting.


def test_events_that_come_together_are_one_write() -> None:
    client = Client().answer(OPENING + chat() + chat(), chat() + chat(), LAST + DONE).end()
    assert client.pieces == [OPENING + chat() + chat(), chat() + chat(), LAST + DONE]
    assert client.leg.tokens == 5


def test_a_leg_has_started_when_something_went_to_the_client() -> None:
    begun = Client().answer(OPENING[:-1])
    assert not begun.leg.started
    opened = Client().answer(OPENING[:-1], OPENING[-1:])
    assert opened.leg.started
    assert opened.leg.tokens == 0


@pytest.mark.parametrize("hold", [b": ping\n\n", b"\n", b"event: ping\n\n", b"retry: 1\n\n"])
@pytest.mark.parametrize("openai", [True, False])
def test_a_heartbeat_does_not_pass_for_a_first_token(hold: bytes, *, openai: bool) -> None:
    client = Client(openai=openai).answer(hold, hold)
    assert not client.leg.started
    assert not client.turns
    client.leg.on_data(chat())
    client.leg.on_data(hold)
    assert client.received == hold + hold + chat() + hold


def test_heartbeats_before_a_first_error_are_not_sent_with_the_retry() -> None:
    client = Client().answer(b": ping\n\n", b": ping\n\n" + ERROR)
    assert client.turns == ["error first"]


def test_an_opening_in_another_role_is_no_token() -> None:
    opening = OPENING.replace(b"assistant", b"user")
    client = Client(resumed_tokens=3).answer(opening, chat())
    assert client.received == chat()
    assert client.leg.tokens == 1


def test_engines_that_put_the_role_into_every_event_are_counted() -> None:
    first = OPENING.replace(b'"content":""', b'"content":"","reasoning":"hm"')
    client = Client().answer(first, first.replace(b'""', b'"a"'), LAST)
    assert client.leg.tokens == 3


# Refusals.


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, b"application/json"), (503, b"text/event-stream"), (200, b"application/json")],
)
def test_an_answer_that_is_no_stream_is_taken_whole(status: int, kind: bytes) -> None:
    headers = [(b"server", b"x"), (b"content-type", kind)]
    client = Client().answer(b"{", b"}", status=status, headers=headers).end()
    assert client.refusals == [(status, headers, b"{}")]
    assert client.turns == ["refused"]
    assert not client.leg.started


def test_an_answer_without_a_content_type_is_no_stream() -> None:
    assert Client().answer(chat(), headers=[]).end().turns == ["refused"]


def test_the_content_type_may_be_written_in_any_case() -> None:
    client = Client()
    client.leg.on_head(200, [(b"content-type", b"Text/Event-Stream")])
    client.leg.on_end()
    assert client.turns == ["broken"]


def test_an_endless_answer_that_is_no_stream_is_not_kept() -> None:
    client = Client().answer(*[bytes(1 << 20)] * 70, status=500).end()
    assert [error.kind for error in client.errors] == [WireFault.TOO_LARGE]


def test_a_refusal_that_breaks_off_is_broken() -> None:
    client = Client().answer(b"{", status=500)
    error = WireError(WireFault.RESET, "gone", sent=True, answered=True)
    client.leg.on_error(error)
    assert client.errors == [error]
    assert client.turns == ["broken"]


def test_a_resumed_stream_cannot_go_on_as_something_else() -> None:
    client = Client(resumed_tokens=3).answer(b"{}", headers=[]).end()
    assert [error.kind for error in client.errors] == [WireFault.PROTOCOL]
    assert Client(resumed_tokens=3).answer(b"{}", status=503).end().turns == ["refused"]


# Errors.


def test_an_error_first_is_told_and_not_sent(body_of: Callable[[str], bytes]) -> None:
    body = body_of("nixl_pd_prefiller_dead_stream.resp")
    first, rest = body[: body.index(b"\n\n") + 2], body[body.index(b"\n\n") + 2 :]
    for pieces in ([body], [first, rest], in_pieces(body, 1)):
        client = Client().answer(*pieces).end()
        assert client.turns == ["error first"]
        assert client.first_errors == [first]


def test_an_error_later_is_forwarded_and_ends_as_a_failure() -> None:
    client = Client().answer(OPENING, chat(), ERROR, DONE).end()
    assert client.received == OPENING + chat() + ERROR + DONE
    assert client.turns[-1] == "error: Internal server error"
    assert "ended" not in client.turns


@pytest.mark.parametrize("before", [OPENING, chat()])
def test_an_error_right_behind_the_first_event_is_a_later_one(before: bytes) -> None:
    client = Client().answer(before + ERROR + DONE).end()
    assert client.received == before + ERROR + DONE
    assert client.turns == ["started", "wrote", "error: Internal server error"]


def test_the_first_event_of_a_resumed_answer_is_not_the_first_of_the_answer() -> None:
    client = Client(resumed_tokens=3).answer(ERROR, DONE).end()
    assert client.received == ERROR + DONE
    assert client.turns[-1] == "error: Internal server error"


@pytest.mark.parametrize(
    ("error", "reason"),
    [("bad", "bad"), ({}, "error"), ({"message": None}, "error"), ([1], "[1]"), (0, "error")],
)
def test_an_error_of_any_form_is_one(error: object, reason: str) -> None:
    client = Client().answer(chat(), event(error=error)).end()
    assert client.turns[-1] == f"error: {reason}"


def test_a_long_reason_is_cut() -> None:
    client = Client().answer(chat(), event(error={"message": "x" * 10_000})).end()
    assert len(client.turns[-1]) < 300


def test_an_absent_error_is_none() -> None:
    client = Client().answer(chat(), LAST.replace(b'{"object"', b'{"error":null,"object"')).end()
    assert client.turns[-1] == "ended"


# Ending.


@pytest.mark.parametrize("pieces", [[], [chat()], [OPENING, chat(), DONE], [b": ping\n\n"], [DONE]])
def test_a_clean_end_without_a_finish_reason_is_a_break(pieces: list[bytes]) -> None:
    assert Client().answer(*pieces).end().turns[-1] == "broken"


def test_every_sequence_has_to_finish() -> None:
    one = LAST
    two = LAST.replace(b'"index":0', b'"index":1')
    assert Client(sequences=2).answer(chat(), one, DONE).end().turns[-1] == "broken"
    assert Client(sequences=2).answer(chat(), one, two, DONE).end().turns[-1] == "ended"


def test_sequences_that_end_in_one_event_are_both_counted() -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    client = Client(sequences=2).answer(event(choices=[choice, choice | {"index": 1}]))
    assert (client.leg.finished, client.leg.tokens) == (2, 2)


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "abort", "content_filter"])
def test_any_finish_reason_finishes(reason: str) -> None:
    assert Client().answer(chat("", reason)).end().turns[-1] == "ended"


def test_a_connection_that_breaks_is_told_once() -> None:
    client = Client().answer(chat())
    error = WireError(WireFault.RESET, "gone", sent=True, answered=True)
    client.leg.on_error(error)
    client.leg.on_error(error)
    client.leg.on_end()
    client.leg.on_data(chat())
    assert client.errors == [error]
    assert client.received == chat()


@pytest.mark.parametrize("started", [True, False])
def test_an_event_without_end_is_cut_off_at_the_limit(*, started: bool) -> None:
    client = Client().answer(*[OPENING, chat()] if started else [])
    for _ in range(20):
        client.leg.on_data(b"data: " + bytes(1 << 20))
    assert [error.kind for error in client.errors] == [WireFault.TOO_LARGE]
    assert client.received == (OPENING + chat() if started else b"")


# Recomputation.


@pytest.mark.parametrize("started", [True, False])
def test_a_recomputed_request_is_hidden_after_what_came_before(*, started: bool) -> None:
    before = completion("Once") + completion(" upon")
    client = Client(keep_text=True)
    if started:
        client.answer(completion("("), before + RECOMPUTED + DONE).end()
    else:
        client.answer(before + RECOMPUTED + DONE).end()
    assert client.turns == ["started", *["wrote"] * (1 + started), "recomputed"]
    assert client.received == (completion("(") if started else b"") + before
    assert client.leg.text == ["("] * started + ["Once", " upon"]
    assert client.leg.tokens == 2 + started
    assert client.leg.finished == 0


def test_what_comes_after_a_recomputation_is_nobodys() -> None:
    client = Client(keep_text=True).answer(completion(), RECOMPUTED, completion(), ERROR, DONE)
    client.end()
    assert client.turns == ["started", "wrote", "recomputed"]


def test_a_recomputation_before_the_first_token_starts_nothing() -> None:
    assert Client(keep_text=True).answer(RECOMPUTED).turns == ["recomputed"]


def test_a_stop_word_of_that_name_is_one_where_ranks_hand_nothing_back() -> None:
    client = Client().answer(completion(), RECOMPUTED, DONE).end()
    assert client.received == completion() + RECOMPUTED + DONE
    assert client.turns[-1] == "ended"


def test_a_resumed_answer_is_not_opened_again() -> None:
    client = Client(resumed_tokens=3, keep_text=True)
    client.answer(OPENING, chat("d"), chat("e"), LAST, DONE).end()
    assert client.received == chat("d") + chat("e") + LAST + DONE
    assert client.leg.text == ["d", "e", "z"]
    assert client.turns[-1] == "ended"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", [""]),
        ('say "\\"\n\t', ['say "\\"\n\t']),
        ("\U0001f999 \ud800", ["\U0001f999 \ud800"]),
        ('"finish_reason":"stop"', ['"finish_reason":"stop"']),
        ('"delta":{"content":"x"}', ['"delta":{"content":"x"}']),
    ],
)
@pytest.mark.parametrize("form", [chat, completion])
def test_text_of_any_kind_is_kept(form: Callable[[str], bytes], text: str, kept: list[str]) -> None:
    client = Client(keep_text=True).answer(form("a"), form(text))
    assert client.leg.text == ["a", *kept]
    assert client.leg.tokens == 2


@pytest.mark.parametrize(
    "delta",
    [
        {"content": None, "tool_calls": [{"index": 0}]},
        {"content": "a", "tool_calls": [{"index": 0}]},
        {"reasoning": "hm"},
        {"content": "a", "reasoning_content": "hm"},
        {"content": ["a"]},
    ],
)
def test_an_answer_that_is_more_than_text_is_not_kept(delta: dict[str, object]) -> None:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    client = Client(keep_text=True).answer(chat(), event(choices=[choice]), chat())
    assert client.leg.text is None
    assert client.leg.tokens == 3


def test_null_members_do_not_make_it_more_than_text() -> None:
    delta: dict[str, object] = {"content": "a", "reasoning": None, "tool_calls": []}
    last = {"index": 0, "delta": {"content": None}, "finish_reason": "stop"}
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    client = Client(keep_text=True).answer(event(choices=[choice]), event(choices=[last]))
    assert client.leg.text == ["a", ""]


def test_several_sequences_have_no_text_to_keep() -> None:
    assert Client(keep_text=True, sequences=2).answer(chat()).leg.text is None


# Usage.


def usage_of(stream: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in re.findall(rb"data: (\{.*)", stream)]
    return [message["usage"] for message in found if message.get("usage")]


def with_details(body: bytes, cached: int) -> bytes:
    """Return a real stream as of an engine that tells cached tokens."""
    return body.replace(
        b',"completion_tokens"', b',"prompt_tokens_details":{"cached_tokens":%d},"completion_tokens"' % cached
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["solo_chat_stream_usage", "solo_chat_stream_usage_continuous", "solo_cmpl_stream_usage"],
)
@pytest.mark.parametrize("size", [1, 400, 10_000])
def test_cached_tokens_are_those_of_the_prefill(
    body_of: Callable[[str], bytes], name: str, size: int
) -> None:
    body = with_details(body_of(f"{name}.resp"), 51)
    client = Client(cached_tokens=16).answer(*in_pieces(body, size)).end()
    assert client.received == with_details(body_of(f"{name}.resp"), 16)
    assert client.leg.usage_tokens == 8
    assert client.leg.tokens == 8


def test_without_a_correction_every_byte_of_the_usage_stays(
    body_of: Callable[[str], bytes],
) -> None:
    body = with_details(body_of("solo_chat_stream_usage_continuous.resp"), 51)
    assert Client().answer(body).end().received == body


@pytest.mark.parametrize("cached", [None, 16])
def test_usage_of_a_resumed_answer_is_that_of_the_whole(
    body_of: Callable[[str], bytes], cached: int | None
) -> None:
    body = with_details(body_of("solo_chat_stream_usage_continuous.resp"), 51)
    client = Client(resumed_tokens=5, cached_tokens=cached).answer(*in_pieces(body, 333)).end()
    before, after = usage_of(body), usage_of(client.received)
    del before[0]  # The opening's, which is not repeated.
    assert len(after) == len(before) == 9
    for was, now in zip(before, after, strict=True):
        assert now == was | {
            "prompt_tokens": was["prompt_tokens"] - 5,
            "completion_tokens": was["completion_tokens"] + 5,
            "prompt_tokens_details": {"cached_tokens": 51 if cached is None else cached},
        }
        assert now["total_tokens"] == now["prompt_tokens"] + now["completion_tokens"]
    # What this rank emitted, for the sum over all ranks.
    assert client.leg.usage_tokens == 8


def test_the_correction_leaves_the_text_alone() -> None:
    text = '"usage":{"prompt_tokens":1,"cached_tokens":2}'
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    token = chat(text)
    last = event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}],
                 usage=usage)  # fmt: skip
    client = Client(cached_tokens=3).answer(token, token, last).end()
    assert client.received == token + token + last.replace(b":7}", b":3}")


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        "many",
        {},
        {"completion_tokens": None},
        {"completion_tokens": True},
        {"completion_tokens": -1},
        {"completion_tokens": 1.5},
        {"completion_tokens": 10**12},
    ],
)
def test_a_count_that_cannot_be_true_is_not_believed(usage: object) -> None:
    client = Client(cached_tokens=1, resumed_tokens=1)
    client.answer(chat(), LAST, event(choices=[], usage=usage), DONE).end()
    assert client.leg.usage_tokens is None
    assert client.turns[-1] == "ended"


def test_a_count_of_thousands_of_digits_is_harmless() -> None:
    last = b'data: {"choices":[],"usage":{"completion_tokens":' + b"9" * 5_000 + b"}}\n\n"
    client = Client(resumed_tokens=1).answer(chat(), LAST, last).end()
    assert client.received == chat() + LAST + last
    assert client.leg.usage_tokens is None


# Nonsense.


@pytest.mark.parametrize(
    "odd",
    [
        b"data: {\n\n",
        b"data: not json\n\n",
        b"data: \x00\xff\n\n",
        b"data: [1, 2]\n\n",
        b"data: null\n\n",
        b"data: {}\n\n",
        b'data: {"choices":null}\n\n',
        b'data: {"choices":{"a":1}}\n\n',
        b'data: {"choices":[null,1,"a",[]]}\n\n',
        b'data: {"choices":[{"delta":null,"finish_reason":7}]}\n\n',
        b'data: {"choices":[{"delta":[],"stop_reason":["recomputed"]}]}\n\n',
        b'data: {"finish_reason":null\n\n',
        b'data: "delta":{"content":"a"finish_reason":null\n\n',
        b'"finish_reason":null,"index":0,"text":"\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: " + b'{"a":' * 100_000 + b"\n\n",
        b"\xef\xbb\xbfdata: {}\n\n",
        b"id: 7\nretry: 1\ndata: {\ndata: }\n\n",
    ],
)
@pytest.mark.parametrize("options", [{}, {"keep_text": True}, {"cached_tokens": 1}])
def test_whatever_an_event_says_it_is_forwarded(odd: bytes, options: dict[str, Any]) -> None:
    client = Client(**options).answer(OPENING, odd, chat(), odd + chat(), odd, LAST).end()
    assert client.received == OPENING + odd + chat() + odd + chat() + odd + LAST
    assert client.turns[-1] == "ended"


@given(st.lists(st.binary(max_size=40), max_size=20), st.booleans(), st.booleans())
def test_no_bytes_make_a_leg_raise(pieces: list[bytes], started: bool, keep: bool) -> None:
    client = Client(keep_text=keep, cached_tokens=1)
    client.answer(*[chat()] if started else [])
    for piece in filter(None, pieces):
        client.leg.on_data(b"data: {" + piece)
    client.end()
    assert client.turns[-1] in ("broken", "ended") or client.turns[-1].startswith("error")


# Other APIs.


def test_the_events_of_other_apis_are_counted_and_pass_as_they_are() -> None:
    events = [
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: content_block_delta\ndata: {"delta":{"text":"data:"}}\n\n',
        b": ping\n\n",
        b'event: ping\ndata: {"type":"ping"}\n\n',
        b"event: message_stop\ndata: {}\n\n",
    ]
    client = Client(openai=False, cached_tokens=1, resumed_tokens=0).answer(*events).end()
    assert client.pieces == events
    assert client.leg.tokens == 4
    assert client.turns[-1] == "ended"


# Time.


def test_gaps_are_measured_between_arrivals_of_events() -> None:
    client = Client().answer()
    for wait_s, piece in [
        (9.0, OPENING),
        (0.5, chat()),
        (0.25, chat()),
        (2.0, chat()[:10]),
        (1.0, chat()[10:]),
        (0.5, LAST),
        (0.0, DONE),
    ]:
        client.now_s += wait_s
        client.leg.on_data(piece)
    assert client.gaps == [0.5, 0.25, 3.0, 0.5, 0.0]
    assert client.leg.gap_max_s == 3.0
    assert client.leg.last_s == client.now_s


def test_a_trickle_of_bytes_is_no_progress() -> None:
    client = Client().answer(OPENING, chat())
    since_s = client.leg.last_s
    for byte in chat()[:-1]:
        client.now_s += 1.0
        client.leg.on_data(bytes([byte]))
    assert client.leg.last_s == since_s
