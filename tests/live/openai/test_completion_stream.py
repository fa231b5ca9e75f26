"""Completion streams: what each event says, whatever its form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.live.stream_client import DONE, ERROR, LAST, OPENING, Client, chat, counts, event


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
