"""Completion streams: what each event says, whatever its form."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.live.stream_client import (
    DONE,
    ERROR,
    GONE,
    LAST,
    OPENING,
    Client,
    chat,
    chunk,
    counts,
    event,
    total,
    usage,
)

from balanceroute.proxy.live.openai.completion_stream import HeldEnd


def test_an_opening_in_another_role_is_no_token() -> None:
    opening = OPENING.replace(b"assistant", b"user")
    client = Client(resumed_tokens=3).answer(opening, chat())
    assert client.received == chat()
    assert client.tokens == 1


def test_engines_that_put_the_role_into_every_event_are_counted() -> None:
    first = OPENING.replace(b'"content":""', b'"content":"","reasoning":"hm"')
    client = Client().answer(first, first.replace(b'""', b'"a"'), LAST)
    assert client.tokens == 3


def test_an_error_later_is_forwarded_and_ends_as_a_failure() -> None:
    client = Client().answer(OPENING, chat(), ERROR, DONE).end()
    assert client.received == OPENING + chat() + ERROR + DONE
    assert client.turns[-1] == "error: Internal server error"
    assert "ended" not in client.turns


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


def test_every_sequence_has_to_finish() -> None:
    one = LAST
    two = LAST.replace(b'"index":0', b'"index":1')
    cut = Client(sequences=2).answer(chat(), one, DONE).end()
    assert cut.turns[-1] == "unreadable: the answer is cut short"
    assert cut.received == chat() + one
    assert Client(sequences=2).answer(chat(), one, two, DONE).end().turns[-1] == "ended"


def test_sequences_that_end_in_one_event_are_both_counted() -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    client = Client(sequences=2).answer(event(choices=[choice, choice | {"index": 1}]))
    assert (client.finished, client.tokens) == (2, 2)


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "abort", "content_filter"])
def test_any_finish_reason_finishes(reason: str) -> None:
    client = Client()
    client.may_abort = True
    assert client.answer(chat("", reason)).end().turns[-1] == "ended"


@pytest.mark.parametrize("before", [[], [OPENING], [OPENING, chat()]])
def test_an_abort_that_nobody_ordered_is_no_end(before: list[bytes]) -> None:
    client = Client().answer(*before, chat("z", "abort")).end()
    assert client.turns[-1] == "aborted"
    assert client.received == (b"".join(before) if len(before) > 1 else b"")


def test_an_abort_that_comes_with_the_opening_leaves_the_answer_unopened() -> None:
    client = Client().answer(OPENING + chat("", "abort"))
    assert client.turns == ["aborted"]


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


# Tokens alone.


@pytest.mark.parametrize("odd", [LAST, ERROR, DONE, b": ping\n\n"])
@pytest.mark.parametrize("counted", [False, True])
def test_nothing_but_tokens_is_taken_for_a_token(odd: bytes, *, counted: bool) -> None:
    client = Client(keep_text=True, counts=counts() if counted else None)
    assert client.reader.take_token(odd[:-2]) == b""
    assert (client.tokens, client.text) == (0, [])
    for _ in range(2):
        assert client.reader.take_token(chat()[:-2]) == chat()
    assert (client.tokens, client.text) == (2, ["a", "a"])


@pytest.mark.parametrize("odd", [LAST, b": ping\n\n", chat().replace(b"\n", b"\r\n")])
@pytest.mark.parametrize("counted", [False, True])
def test_tokens_around_another_event_are_counted_once(odd: bytes, *, counted: bool) -> None:
    client = Client(keep_text=True, counts=counts() if counted else None)
    client.answer(OPENING, chat(), chat(), chat() * 2 + odd + chat())
    assert client.received == OPENING + chat() * 4 + odd + chat()
    assert client.text is not None
    assert client.tokens == len(client.text) == 5 + (odd[:1] == b"d")
    assert len(client.gaps) == 2


def test_only_tokens_are_expected_between_the_first_and_the_last() -> None:
    client = Client(counts=counts())
    plain = [client.reader.plain]
    client.answer()
    for one in (OPENING, chat(), chat(), LAST):
        client.leg.on_data(one)
        plain.append(client.reader.plain)
    assert plain == [False, False, True, True, False]


# The last token of a stream, and the total that its client did not ask for.


def test_the_fingerprint_moves_to_the_last_token() -> None:
    client = Client(counts=counts()).answer(chunk(**usage(1)))
    client.leg.on_data(chunk("b", "stop", **usage(2)))
    assert client.received == chunk()
    client.leg.on_data(total(2, system_fingerprint="fp-1"))
    end = chunk("b", "stop").removesuffix(b"}\n\n") + b',"system_fingerprint":"fp-1"}\n\n'
    assert client.received == chunk() + end
    client.leg.on_data(DONE)
    client.end()
    assert client.received == chunk() + end + DONE
    assert client.leg.count_tokens() == 2


def test_a_sole_token_starts_the_stream_when_its_total_came() -> None:
    client = Client(counts=counts()).answer(chunk("a", "length", **usage(1)))
    assert not client.turns
    client.leg.on_data(total(1) + DONE)
    assert client.turns == ["started", "wrote"]
    assert client.end().received == chunk("a", "length") + DONE


@pytest.mark.parametrize("late", [DONE, ERROR, chunk("late")])
def test_the_last_token_does_not_wait_for_a_total_that_does_not_come(late: bytes) -> None:
    client = Client(counts=counts()).answer(chunk(**usage(1)), chunk("b", "stop", **usage(2)), late)
    assert client.received == chunk() + chunk("b", "stop") + late


def test_a_stream_that_ends_with_its_last_token_is_whole() -> None:
    client = Client(counts=counts()).answer(chunk("b", "stop", **usage(1))).end()
    assert client.received == chunk("b", "stop")
    assert client.turns == ["started", "wrote", "ended"]


def test_a_stream_that_breaks_off_after_its_last_token_has_that() -> None:
    client = Client(counts=counts()).answer(chunk(**usage(1)), chunk("b", "stop", **usage(2)))
    client.leg.on_error(GONE)
    assert client.received == chunk() + chunk("b", "stop") + DONE
    assert client.turns[-1] == "cut"


def test_a_sole_token_that_breaks_off_before_its_total_can_be_asked_for_again() -> None:
    client = Client(counts=counts()).answer(chunk("a", "length", **usage(1)))
    client.leg.on_error(GONE)
    assert client.turns == ["broken"]


def test_a_comment_neither_waits_nor_ends_the_wait() -> None:
    client = Client(counts=counts()).answer(chunk(**usage(1)), chunk("b", "stop", **usage(2)))
    client.leg.on_data(b": ping\n\n" + total(2) + DONE)
    assert client.end().received == chunk() + b": ping\n\n" + chunk("b", "stop") + DONE


def test_what_was_held_before_a_sole_token_comes_before_a_comment_behind_it() -> None:
    client = Client(counts=counts()).answer(b": a\n\n", chunk("a", "length", **usage(1)))
    client.leg.on_data(b": b\n\n")
    assert client.received == b": a\n\n: b\n\n"
    client.leg.on_data(total(1))
    assert client.received == b": a\n\n: b\n\n" + chunk("a", "length")


def parsed(event: bytes) -> dict[str, object]:
    message: dict[str, object] = json.loads(event.removeprefix(b"data: "))
    return message


@pytest.mark.parametrize("line_end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_a_fingerprint_stands_before_the_line_ends(line_end: bytes) -> None:
    end = HeldEnd()
    end.hold(b'data: {"a":1}' + line_end)
    released = end.release(parsed(total(1, system_fingerprint='f"p')))
    assert released == (b'data: {"a":1,"system_fingerprint":"f\\"p"}' + line_end, True)


def test_an_end_is_released_once() -> None:
    end = HeldEnd()
    end.hold(b"data: {}\n\n")
    assert end.release(None) == (b"data: {}\n\n", False)
    assert end.release(None) == (b"", False)
    assert end.release(parsed(total(1))) == (b"", True)
