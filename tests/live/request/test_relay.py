"""The stream from an engine: every byte of it, whole events, and no end that is not true."""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.live.stream_client import (
    ALL,
    DONE,
    ERROR,
    GONE,
    LAST,
    OPENING,
    SSE,
    TOTAL,
    Client,
    FakeLent,
    chat,
    chunk,
    counts,
    event,
    in_pieces,
    total,
    usage,
)
from tests.support.site import transcript

from balanceroute.proxy.live.openai.completion_stream import TokenStream
from balanceroute.proxy.live.openai.token_ids import BackedUpIds, Care, GeneratedIds, TokenIds
from balanceroute.proxy.live.request.relay import BufferedLeg
from balanceroute.proxy.wire.http1.pump import (
    COMPLETIONS,
    COUNTED,
    GENERATE,
    HIDE,
    IDS,
    IDS_OF_COMPLETION,
    IDS_WAIT,
    NAMED,
    NO_USAGE,
    TEXT,
    EventForm,
    Passed,
)
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault


def dumps(value: object) -> bytes:
    return json.dumps(value).encode()


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


# Real streams.


def check_real(name: str, body: bytes, pieces: Iterable[bytes], **options: Any) -> Client:
    sequences, tokens, counted = STREAMS[name]
    client = Client(sequences=sequences, **options).answer(*pieces)
    assert client.finished == sequences
    client.end()
    assert client.received == body
    assert client.turns[0] == "started"
    assert client.turns[-1] == "ended"
    assert set(client.turns[1:-1]) == {"wrote"}
    assert client.tokens == tokens
    assert client.usage_tokens == counted
    return client


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 239, 1_000, 100_000])
def test_a_real_stream_reaches_the_client_byte_for_byte(name: str, size: int) -> None:
    body = transcript(f"{name}.resp")
    check_real(name, body, in_pieces(body, size))


@pytest.mark.parametrize("name", ["mooncake_decode_before_prefill", "solo_chat_stream_usage"])
def test_it_does_not_matter_where_a_stream_is_split(name: str) -> None:
    body = transcript(f"{name}.resp")
    for at in range(1, len(body)):
        check_real(name, body, [body[:at], body[at:]])


@pytest.mark.parametrize("name", STREAMS)
def test_a_real_stream_is_the_same_when_its_text_is_kept(name: str) -> None:
    body = transcript(f"{name}.resp")
    client = check_real(name, body, re.findall(rb"data: .*\n\n", body), keep_text=True)
    if STREAMS[name][0] > 1 or "tools" in name:
        assert client.text is None
    else:
        text = "".join(
            choice.get("delta", choice).get("content", choice.get("text", ""))
            for line in re.findall(rb"data: (\{.*)", body)
            for choice in json.loads(line)["choices"]
        )
        assert client.text is not None
        assert "".join(client.text) == text


@given(st.lists(st.integers(1, 300), max_size=60), st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_stream_in_other_line_ends_is_the_same_in_any_pieces(
    sizes: list[int], line_end: str
) -> None:
    # A comment that comes sooner does not wait for what the opening waits for.
    plain = OPENING + chat() + b": ping\n\n" + chat() * 6 + b"event: x\nid: 1\n" + LAST + DONE
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
    assert client.tokens == 8


def test_a_client_has_only_whole_events_whenever_a_stream_breaks_off() -> None:
    body = transcript("nixl_pd_client_disconnect.resp")
    for at in range(len(body)):
        client = Client().answer(*filter(None, [body[:at]])).end()
        whole = body[: body.rfind(b"\n\n", 0, at) + 2] if b"\n\n" in body[:at] else b""
        if body[at:].startswith(b"\n") and body[:at].rstrip(b"\n").endswith(b"}"):
            whole = body[:at].rstrip(b"\n") + b"\n\n"  # All that it lacks is its blank line.
        assert client.received == whole
        assert client.turns[-1] == "broken"
        assert client.errors[0].kind is WireFault.RESET


# Starting.


def test_events_that_come_together_are_one_write() -> None:
    client = Client().answer(OPENING + chat() + chat(), chat() + chat(), LAST + DONE).end()
    assert client.pieces == [OPENING + chat() + chat(), chat() + chat(), LAST + DONE]
    assert client.tokens == 5


def test_a_leg_has_started_when_something_went_to_the_client() -> None:
    begun = Client().answer(OPENING[:-1])
    assert not begun.leg.started
    opened = Client().answer(OPENING, chat()[:-1], chat()[-1:])
    assert opened.leg.started
    assert opened.tokens == 1


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
    client = Client().answer(*[bytes(1 << 20)] * 70, status=500)
    assert [error.kind for error in client.errors] == [WireFault.TOO_LARGE]
    client.end()
    assert client.turns == ["broken"]


def test_a_refusal_that_breaks_off_is_broken() -> None:
    client = Client().answer(b"{", status=500)
    client.leg.on_error(GONE)
    assert client.errors == [GONE]
    assert client.turns == ["broken"]


def test_a_compressed_stream_is_broken() -> None:
    client = Client().answer(headers=[*SSE, (b"content-encoding", b"gzip")])
    assert [error.kind for error in client.errors] == [WireFault.PROTOCOL]
    client.leg.on_data(OPENING)
    assert client.received == b""


def test_a_resumed_stream_cannot_go_on_as_something_else() -> None:
    client = Client(resumed_tokens=3).answer(b"{}", headers=[]).end()
    assert [error.kind for error in client.errors] == [WireFault.PROTOCOL]
    assert Client(resumed_tokens=3).answer(b"{}", status=503).end().turns == ["refused"]
    said = b'{"error": {"message": "no", "code": 400}}'
    assert Client(resumed_tokens=3).answer(said, headers=[]).end().turns == ["refused"]


# Ending.


@pytest.mark.parametrize("pieces", [[], [chat()], [OPENING, chat()], [b": ping\n\n"]])
def test_a_clean_end_without_a_finish_reason_is_a_break(pieces: list[bytes]) -> None:
    assert Client().answer(*pieces).end().turns[-1] == "broken"


UNFINISHED: list[object] = [None, 0, 1, "", {}, {"type": "stop"}, [], ["stop"], True]


@pytest.mark.parametrize("reason", UNFINISHED)
def test_an_answer_that_is_not_finished_is_never_called_done(reason: object) -> None:
    last = LAST.replace(b'"finish_reason":"stop"', b'"finish_reason":' + dumps(reason))
    for pieces in ([OPENING, chat(), last, DONE], [OPENING, chat(), last, DONE.rstrip(b"\n")]):
        client = Client().answer(*pieces).end()
        assert client.received == OPENING + chat() + last
        assert client.turns[-1] == "unreadable: the answer is cut short"
    # Nothing of it has been sent, so another engine may give the answer.
    assert Client().answer(OPENING + last + DONE).turns == ["unreadable: the answer is cut short"]


@pytest.mark.parametrize("choices", ["a", {}, {"index": 0}, 5, None, True])
def test_an_answer_without_a_list_of_choices_reaches_no_client(choices: object) -> None:
    odd = event(object="chat.completion.chunk", choices=choices)
    for pieces in ([odd, odd, DONE], [odd + odd + DONE], [DONE]):
        assert Client().answer(*pieces).turns == ["unreadable: the answer is cut short"]
    later = Client().answer(chat(), odd, DONE)
    assert later.received == chat() + odd
    assert later.turns[-1] == "unreadable: the answer is cut short"


@pytest.mark.parametrize("lacks", [1, 2])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("end", [LAST, LAST + DONE, chat() + LAST + total(3) + DONE])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_an_event_that_lacks_its_blank_line_at_the_end_is_one(
    end: bytes, line_end: str, lacks: int, size: int
) -> None:
    body = (OPENING + chat() + end).replace(b"\n", line_end.encode())
    given = body[: -lacks * len(line_end)]
    client = Client().answer(*in_pieces(given, size)).end()
    # Without any line end nothing tells which ones the stream has.
    whole = given + b"\n\n" if lacks == 2 else body
    assert client.received == whole
    assert client.turns[-1] == "ended"
    assert client.finished == 1
    # As does one that breaks off there, which is told, too.
    cut = Client().answer(given)
    cut.leg.on_error(GONE)
    assert cut.received == (whole if DONE[:-2] in end else whole + DONE)
    assert cut.turns[-1] == "cut"


@pytest.mark.parametrize("at", range(1, len(DONE) - 2))
def test_a_stream_that_breaks_off_within_its_last_event_ends_whole(at: int) -> None:
    client = Client().answer(OPENING, chat(), LAST + DONE[:at]).end()
    assert client.received == OPENING + chat() + LAST + DONE


@pytest.mark.parametrize("rest", [b"\n", b"\r\n", b": bye", b"x", b"data: x", b'data: {"a":', DONE])
def test_what_stands_behind_the_end_changes_nothing(rest: bytes) -> None:
    client = Client().answer(OPENING, chat(), LAST, DONE + rest).end()
    assert client.received.startswith(OPENING + chat() + LAST + DONE)
    assert client.turns[-1] == "ended"


def test_a_part_of_an_event_is_none() -> None:
    for at in range(1, len(LAST) - 2):
        client = Client().answer(OPENING, chat(), LAST[:at]).end()
        assert client.received == OPENING + chat()
        assert client.turns[-1] == "broken"


def test_a_connection_that_breaks_is_told_once() -> None:
    client = Client().answer(chat())
    client.leg.on_error(GONE)
    client.leg.on_error(GONE)
    client.leg.on_end()
    client.leg.on_data(chat())
    assert client.errors == [GONE]
    assert client.received == chat()


@pytest.mark.parametrize("behind", [b"", DONE, b": ping\n\n", b"data: [DO"])
def test_a_break_behind_the_last_token_leaves_nothing_out(behind: bytes) -> None:
    client = Client().answer(OPENING, chat(), LAST + behind)
    client.leg.on_error(GONE)
    client.leg.on_error(GONE)
    assert client.turns[-1] == "cut"
    whole = behind if behind.endswith(b"\n\n") else b""
    assert client.received == OPENING + chat() + LAST + whole.removesuffix(DONE) + DONE


def test_a_break_before_the_last_sequence_has_ended_is_one() -> None:
    client = Client(sequences=2).answer(OPENING, LAST)
    client.leg.on_error(GONE)
    assert client.turns[-1] == "broken"
    assert client.received == OPENING + LAST


@pytest.mark.parametrize(
    ("last", "told", "ending"),
    [
        (chunk("z", "stop", **usage(7)), b"", total(7) + DONE),
        # As the prefiller and earlier ranks have counted.
        (chunk("z", "stop", **usage(7)), total(7), DONE),
        (chunk("z", "stop"), b"", None),
        (chunk("z", "stop", usage={"prompt_tokens": -1}), b"", None),
        (chunk("z", "stop"), total(7), DONE),
    ],
)
def test_a_total_that_did_not_come_is_told_if_the_last_token_tells_it(
    last: bytes, told: bytes, ending: bytes | None
) -> None:
    client = Client(counts=counts(TOTAL), asks_total=True).answer(chunk(**usage(6)), last + told)
    before = client.received
    client.leg.on_error(GONE)
    assert client.turns[-1] == ("broken" if ending is None else "cut")
    assert client.received == before + (ending or b"")


def test_the_total_of_a_continued_answer_is_that_of_the_whole() -> None:
    client = Client(counts=counts(ALL), asks_total=True, cached_tokens=2, resumed_tokens=3).answer(
        chunk("z", "stop", **usage(4))
    )
    client.leg.on_error(GONE)
    assert b'"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":2}' in client.pieces[-1]
    assert b'"prompt_tokens":6,"total_tokens":13' in client.pieces[-1]


def test_an_end_that_was_held_comes_before_what_the_stream_lacks() -> None:
    client = Client(counts=counts()).answer(chunk(**usage(1)), chunk("z", "stop", **usage(2)))
    assert client.received == chunk()
    client.leg.on_error(GONE)
    assert client.received == chunk() + chunk("z", "stop") + DONE


def test_an_error_that_the_engine_reported_is_not_told_again_when_it_breaks_off() -> None:
    client = Client().answer(OPENING, chat(), ERROR)
    client.leg.on_error(GONE)
    assert client.turns[-1] == "error cut: Internal server error"
    assert client.received == OPENING + chat() + ERROR


def test_a_stream_of_named_events_is_complete_with_its_final_one() -> None:
    start, stop = (b"event: message_%s\ndata: {}\n\n" % one for one in (b"start", b"stop"))
    token = b"event: content_block_delta\ndata: {}\n\n"
    for events, turn in ([start, token], "broken"), ([start, token, stop], "cut"):
        client = Client(openai=False).answer(*events)
        client.leg.on_error(GONE)
        assert (client.turns[-1], client.received) == (turn, b"".join(events))


def test_what_opens_a_message_waits_a_moment_for_what_follows() -> None:
    start = b"event: message_start\ndata: {}\n\n"
    client = Client(openai=False).answer(start)
    client.leg.release(client.now_s + 0.1)
    assert client.turns == []
    client.leg.release(client.now_s + 0.3)
    assert (client.received, client.turns[0]) == (start, "started")
    created = Client(openai=False).answer(b"event: response.created\ndata: {}\n\n")
    created.leg.release(created.now_s + 99.0)
    assert created.turns == []  # The engine says that before it has begun.


@pytest.mark.parametrize("started", [True, False])
def test_an_event_without_end_is_cut_off_at_the_limit(*, started: bool) -> None:
    client = Client().answer(*[OPENING, chat()] if started else [])
    for _ in range(20):
        client.leg.on_data(b"data: " + bytes(1 << 20))
    assert [error.kind for error in client.errors] == [WireFault.TOO_LARGE]
    assert client.received == (OPENING + chat() if started else b"")


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
    assert client.gaps == [0.25, 3.0, 0.5, 0.0]
    assert client.leg.gap_max_s == 3.0
    assert client.leg.last_s == client.now_s


def test_the_longest_gap_stays_among_events_that_are_taken_as_lines() -> None:
    client = Client().answer(OPENING, *ordinary(2))
    for gap_s in (0.5, 3.0, 1.0):
        waiting(client, 1, gap_s)
    assert client.gaps[-3:] == [0.5, 3.0, 1.0]
    assert client.leg.gap_max_s == 3.0


@pytest.mark.parametrize(
    ("openai", "sign"),
    [
        (True, b": keep-alive\n\n"),
        (True, b"retry: 1000\n\n"),
        (True, b"\n"),
        (False, b'event: ping\ndata: {"type": "ping"}\n\n'),
    ],
)
def test_a_sign_of_life_without_data_is_no_progress(*, openai: bool, sign: bytes) -> None:
    said = chat() if openai else b"event: message_start\ndata: {}\n\n"
    client = Client(openai=openai).answer(OPENING, said) if openai else None
    client = client or Client(openai=openai).answer(said)
    since_s, gaps = client.leg.last_s, list(client.gaps)
    for _ in range(3):
        client.now_s += 1.0
        client.leg.on_data(sign)
    assert client.received.endswith(3 * sign)
    assert (client.leg.last_s, client.gaps) == (since_s, gaps)
    client.leg.on_data(sign + said)
    assert client.leg.last_s == client.now_s


def test_a_trickle_of_bytes_is_no_progress() -> None:
    client = Client().answer(OPENING, chat())
    since_s = client.leg.last_s
    for byte in chat()[:-1]:
        client.now_s += 1.0
        client.leg.on_data(bytes([byte]))
    assert client.leg.last_s == since_s


# Moved by others.


def ordinary(count: int) -> list[bytes]:
    return [chat(f" t{number}") for number in range(count)]


def waiting(client: Client, count: int, gap_s: float = 0.02) -> Client:
    """Let events come alone, each after a while."""
    for one in ordinary(count):
        client.now_s += gap_s
        line = one[:-2]
        assert client.leg.takes_lines
        client.leg.on_line(line)
    return client


def lending(**options: Any) -> Client:
    client = Client(lends=True, **options).answer(OPENING, *ordinary(2))
    assert client.forms == []
    return client


def passed(events: int, tokens: int, uncounted: int = 0) -> Passed:
    return Passed(events, tokens, uncounted)


def test_a_stream_is_lent_once_its_engine_has_waited_a_few_times() -> None:
    client = waiting(lending(), 2)
    assert client.forms == []
    client.lent = FakeLent()
    waiting(client, 1)
    assert client.forms == [EventForm(COMPLETIONS, 0, 5)]
    client.lent.tokens = 50
    assert client.leg.read_tokens() == 50
    client.leg.catch_up()
    assert (client.lent.caught_up, client.lent.stopped) == (1, 0)
    client.lent.paused = True
    client.leg.catch_up()
    assert client.lent.stopped == 1
    client.leg.last_s = client.now_s + 0.5  # Of a finer clock.
    client.leg.came_back(passed(45, 50))
    assert client.leg.last_s == client.now_s
    assert client.turns[-1] == "back"
    waiting(client, 1, gap_s=0.0)
    assert client.tokens == client.leg.count_tokens() == 51


@pytest.mark.parametrize("gap_s", [0.0, 0.001])
def test_one_whose_engine_does_not_wait_is_not_lent(gap_s: float) -> None:
    assert waiting(lending(), 50, gap_s).forms == []


@pytest.mark.parametrize(("together", "lent"), [(2, True), (4, True), (5, False), (40, False)])
def test_an_engine_that_says_much_at_a_time_does_not_wait(together: int, lent: bool) -> None:
    client = lending()
    for _ in range(3):
        client.now_s += 0.02
        client.leg.on_lines([one[:-2] for one in ordinary(together)])
    assert bool(client.forms) is lent
    for _ in range(20):
        waiting(client, 2)
        client.now_s += 0.02
        client.leg.on_lines([one[:-2] for one in ordinary(5)])
    assert bool(client.forms) is lent


def test_events_that_share_a_chunk_are_lent_too_but_for_half_ones() -> None:
    client = lending()
    one, other, *_ = ordinary(2)
    for _ in range(4):
        client.now_s += 0.02
        client.leg.on_data(one + other + other[:9])
        client.now_s += 0.02
        client.leg.on_data(other[9:])
    assert client.forms  # Those that end an event.
    client = lending()
    client.leg.on_data(one + other[:9])
    for _ in range(20):
        client.now_s += 0.02
        client.leg.on_data(other[9:] + other[:9])
    assert client.forms == []


def test_named_events_are_lent_too() -> None:
    client = Client(openai=False, lends=True)
    data = b'{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"},"index":0}'
    said = b"event: content_block_delta\ndata: " + data + b"\n\n"
    client.answer(b'event: message_start\ndata: {"type":"message_start"}\n\n', said, said)
    for _ in range(3):
        client.now_s += 0.02
        client.leg.on_data(said)
    assert client.forms == [EventForm(NAMED, 0, 5)]


def test_nothing_is_lent_unless_it_is_asked_for() -> None:
    client = Client().answer(OPENING, *ordinary(2))
    assert waiting(client, 50).forms == []


def test_what_comes_back_in_vain_stays() -> None:
    client = lending()
    for _ in range(3):
        client.lent = FakeLent()
        waiting(client, 3)
        client.leg.came_back(passed(1, client.tokens + 1))
    assert len(client.forms) == 3
    assert len(waiting(client, 50).forms) == 3


def test_what_comes_back_after_much_is_lent_again() -> None:
    client = lending()
    for _ in range(20):
        client.lent = FakeLent()
        waiting(client, 3)
        client.leg.came_back(passed(100, client.tokens + 100))
    assert len(client.forms) == 20
    assert client.tokens == 2 + 20 * 103


def test_what_nobody_can_take_is_offered_a_few_times() -> None:
    client = waiting(lending(), 100)
    assert len(client.forms) == 3


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"counts": counts()}, EventForm(COMPLETIONS, COUNTED | HIDE, 1)),
        ({"counts": counts(ALL)}, EventForm(COMPLETIONS, COUNTED, 1)),
        (
            {"counts": counts(ALL), "cached_tokens": 3},
            EventForm(COMPLETIONS, COUNTED | NO_USAGE, 1),
        ),
        ({"counts": counts(TOTAL), "cached_tokens": 3}, EventForm(COMPLETIONS, COUNTED | HIDE, 1)),
        ({"keep_text": True}, EventForm(COMPLETIONS, TEXT, 1)),
        ({"ids": TokenIds()}, None),
        ({"ids": BackedUpIds(Care(again=3))}, None),
    ],
    ids=["asked", "all", "all and cached", "total", "text", "ids", "ids to give back"],
)
def test_how_events_are_to_be_taken(options: dict[str, Any], form: EventForm | None) -> None:
    client = Client(**options).answer(OPENING, chunk("a", **usage(1)))
    assert client.reader.form == form


def test_events_of_generate_are_taken_by_their_ids() -> None:
    ids = GeneratedIds(b"[1]")
    usage_of = Client(cached_tokens=3).usage
    reader = TokenStream(
        1,
        resumes=False,
        usage=usage_of,
        asks_total=False,
        counts=None,
        transcript=None,
        ids=ids,
        expensive=lambda: None,
        may_abort=lambda: False,
    )
    assert reader.form == EventForm(GENERATE, IDS, 0)
    reader.take_passed(Passed(2, 3, 0, ids=b",4,5,6"))
    assert (reader.read_tokens(), ids.kept) == (3, b"4,5,6")
    ids.lost = True
    assert reader.form is None


def test_named_events_are_taken_by_name() -> None:
    client = Client(openai=False)
    assert client.reader.form == EventForm(NAMED, 0, 0)
    client.reader.take_passed(passed(3, 3))
    assert client.tokens == 3
    assert client.reader.past_opening


def test_counts_that_an_engine_left_out_meanwhile_are_not_told() -> None:
    for uncounted in (0, 1):
        kept = counts()
        client = Client(counts=kept).answer(OPENING, chunk("a", **usage(1)))
        client.reader.take_passed(passed(4, 7, uncounted))
        assert client.tokens == 7
        assert kept.reported == (None if uncounted else 7)
        client.answer(chunk("b", **usage(9)))
        assert client.tokens == 9


def test_text_that_passed_elsewhere_is_kept() -> None:
    client = Client(keep_text=True).answer(OPENING, chat("a"))
    whole = chat('"')
    texts = b"\1\0\0\0b" + (len(whole) | 1 << 31).to_bytes(4, "little") + whole + b"\0\0\0\0"
    client.reader.take_passed(Passed(3, 4, 0, texts, chat("")))
    assert client.text == ["a", "b", '"', ""]
    assert not client.transcript.is_whole


def test_ids_that_passed_elsewhere_are_kept() -> None:
    ids = TokenIds()
    client = Client(ids=ids)

    def one(text: str, *told: int, **more: Any) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        choice |= {"stop_reason": None} | more | {"token_ids": list(told)}
        return event(object="text_completion", choices=[choice])

    client.answer(one("a", 5, prompt_token_ids=[1, 2]), one("", 6, prompt_token_ids=None))
    flags = IDS | IDS_OF_COMPLETION | IDS_WAIT
    assert client.reader.form == EventForm(COMPLETIONS, flags, 2)
    behind = one("b", 8, 9)
    client.reader.take_passed(Passed(3, 5, 0, ids=b",7", new_ids=b"8,9", behind=behind))
    assert (ids.kept, ids.seen, ids.behind) == (b"5,6,7", 5, "b")
    client.reader.take_passed(Passed(1, 6, 0, new_ids=b""))
    client.reader.take_passed(Passed(1, 7, 0, ids=b",10"))
    assert (ids.kept, ids.seen, ids.behind) == (b"5,6,7,8,9,10", 6, "")
    ids.lost = True
    assert client.reader.form is None


# A leg whose answer is taken whole.


HEADERS = [(b"content-type", b"application/json")]


class Listener:
    """Notes what it is told."""

    def __init__(self, max_bytes: int) -> None:
        self.answers: list[tuple[int, Headers, bytes]] = []
        self.errors: list[WireError] = []
        self.leg = BufferedLeg(self._answered, self.errors.append, max_bytes=max_bytes)
        self.leg.on_head(200, HEADERS)

    def _answered(self, status: int, headers: Headers, body: bytes) -> None:
        self.answers.append((status, headers, body))


@pytest.mark.parametrize("pieces", [[], [b"{}"], [b"{", b"", b"}", b"  "]])
def test_the_pieces_of_an_answer_are_joined(pieces: list[bytes]) -> None:
    listener = Listener(max_bytes=4)
    for piece in pieces:
        listener.leg.on_data(piece)
    listener.leg.on_end()
    assert listener.answers == [(200, HEADERS, b"".join(pieces))]
    assert not listener.errors


def test_an_answer_past_the_limit_is_an_error_and_nothing_of_it_is_kept() -> None:
    listener = Listener(max_bytes=4)
    for piece in (b"12", b"34"):
        listener.leg.on_data(piece)
    assert not listener.errors
    listener.leg.on_data(b"5")
    assert [error.kind for error in listener.errors] == [WireFault.TOO_LARGE]
    assert "longer than 4 bytes" in str(listener.errors[0])
    # Whoever hears of it aborts the exchange; until then nothing more is told.
    listener.leg.on_data(b"6")
    listener.leg.on_end()
    assert not listener.answers
    assert len(listener.errors) == 1
    assert listener.errors[0].sent
    assert listener.errors[0].answered


def test_an_endless_answer_does_not_fill_the_memory() -> None:
    listener = Listener(max_bytes=4)
    piece = bytes(5)
    held = sys.getrefcount(piece)
    for _ in range(3):
        listener.leg.on_data(piece)
    assert sys.getrefcount(piece) == held


def test_a_failure_is_handed_over() -> None:
    listener = Listener(max_bytes=4)
    listener.leg.on_data(b"12")
    error = WireError(WireFault.RESET, "gone", sent=True, answered=True)
    listener.leg.on_error(error)
    assert listener.errors == [error]
    assert not listener.answers
