"""The text of an answer, kept for another rank to go on from, and requests that are handed back."""

import json
from collections.abc import Callable

import pytest
from tests.live.stream_client import (
    ALL,
    DONE,
    ERROR,
    GONE,
    LAST,
    OPENING,
    RECOMPUTED,
    Client,
    chat,
    chunk,
    completion,
    counts,
    event,
    in_pieces,
    total,
    usage,
)

from balanceroute.proxy.live.openai.token_ids import TokenIds


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
    assert client.text == ["a", *kept]
    assert client.tokens == 2


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
    assert client.text is None
    assert client.tokens == 3


def test_null_members_do_not_make_it_more_than_text() -> None:
    delta: dict[str, object] = {"content": "a", "reasoning": None, "tool_calls": []}
    last = {"index": 0, "delta": {"content": None}, "finish_reason": "stop"}
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    client = Client(keep_text=True).answer(event(choices=[choice]), event(choices=[last]))
    assert client.text == ["a", ""]


def test_several_sequences_have_no_text_to_keep() -> None:
    assert Client(keep_text=True, sequences=2).answer(chat()).text is None


def test_text_that_is_given_up_amid_a_piece_stays_given_up() -> None:
    """It raised: the events behind the tool call had no text to go on from."""
    call = {"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}
    client = Client(keep_text=True).answer(chat())
    client.leg.on_data(event(choices=[call]) + chat() + chat())
    assert client.text is None
    assert client.tokens == 4
    assert client.received == chat() + event(choices=[call]) + chat() + chat()


# Handed back.


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
    assert client.text == ["("] * started + ["Once", " upon"]
    assert client.tokens == 2 + started
    assert client.finished == 0


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
    assert client.text == ["d", "e", "z"]
    assert client.turns[-1] == "ended"


def test_text_that_came_only_with_the_hand_back_is_an_event_of_its_own() -> None:
    client = Client(keep_text=True).answer(completion("a"), completion("b", "stop", "recomputed"))
    assert client.received == completion("a")
    assert client.text == ["a", "b"]
    assert client.transcript.withheld == completion("b")


def test_withheld_text_comes_without_ids_that_the_client_did_not_ask_for() -> None:
    back = completion("b", "stop", "recomputed")
    client = Client(keep_text=True, ids=TokenIds())
    client.answer(completion("a"), back.replace(b'"index":0', b'"index":0,"token_ids":[7]'))
    seen = json.loads(client.transcript.withheld.removeprefix(b"data: "))
    assert seen["choices"][0]["token_ids"] is None


def test_a_hand_back_without_text_withholds_nothing() -> None:
    client = Client(keep_text=True).answer(completion("a"), RECOMPUTED)
    assert client.text == ["a"]
    assert client.transcript.withheld == b""


def test_a_hand_back_that_is_more_than_text_gives_the_text_up() -> None:
    delta = {"tool_calls": [{"index": 0}]}
    choice = {"index": 0, "delta": delta, "finish_reason": "stop", "stop_reason": "recomputed"}
    client = Client(keep_text=True).answer(chat("a"), event(choices=[choice]))
    assert client.turns[-1] == "recomputed"
    assert client.text is None
    assert client.transcript.withheld == b""


# Handed back, with the engine's own counts.


@pytest.mark.parametrize("size", [20, 1_000_000])
def test_the_count_of_a_request_that_is_handed_back_comes_with_the_total(size: int) -> None:
    client = Client(counts=counts(each=False), keep_text=True)
    client.answer(*in_pieces(chunk() + chunk("bcd") + RECOMPUTED, size))
    assert "recomputed" not in client.turns
    client.leg.on_data(b": ping\n\n" + total(4) + DONE)
    assert client.turns[-1] == "recomputed"
    assert client.leg.count_tokens() == 4
    assert client.received == chunk() + chunk("bcd")


def test_the_count_of_a_request_that_is_handed_back_may_come_with_that_word() -> None:
    client = Client(counts=counts(), keep_text=True)
    client.answer(chunk(**usage(1)), chunk("bcd", **usage(4)), RECOMPUTED)
    assert client.turns[-1] == "recomputed"
    assert client.leg.count_tokens() == 4


@pytest.mark.parametrize("end", [Client.end, lambda client: client.answer(DONE)])
def test_a_request_is_handed_back_without_a_total_too(end: Callable[[Client], Client]) -> None:
    client = Client(counts=counts(each=False), keep_text=True).answer(chunk(), RECOMPUTED)
    end(client)
    assert client.turns.count("recomputed") == 1
    assert client.leg.count_tokens() == 1


def test_a_connection_that_breaks_after_a_request_was_handed_back_harms_nobody() -> None:
    client = Client(counts=counts(each=False), keep_text=True).answer(chunk(), RECOMPUTED)
    client.leg.on_error(GONE)
    assert client.turns[-1] == "recomputed"


def test_withheld_text_is_counted_and_told_as_any_other() -> None:
    back = completion("b", "stop", "recomputed")
    client = Client(counts=counts(ALL), keep_text=True, resumed_tokens=4)
    client.answer(chunk("a", **usage(1)), back[:-3] + b"," + event(**usage(2))[7:])
    assert client.turns[-1] == "recomputed"
    assert client.leg.count_tokens() == 2
    seen = json.loads(client.transcript.withheld.removeprefix(b"data: "))
    assert (seen["choices"][0]["text"], seen["choices"][0]["finish_reason"]) == ("b", None)
    assert seen["usage"] == {"prompt_tokens": 5, "total_tokens": 11, "completion_tokens": 6}


@pytest.mark.parametrize(
    ("text", "told", "more", "whole"),
    [
        ("a", {"token_ids": [1]}, [], True),
        ("", {"token_ids": [1]}, [], False),
        ("ab", {"token_ids": [1, 2]}, [], False),
        ("a", {"logprobs": {"content": [{"token": "a"}]}}, [], True),
        ("a", {"logprobs": {"content": [{"token": "a"}, {"token": ""}]}}, [], False),
        ("ab", {"token_ids": [1, 2]}, [chat("c")], True),
        # Text that was withheld may be that of any token before.
        ("a", {"token_ids": [1]}, [completion("b", "stop", "recomputed")], False),
    ],
)
def test_tokens_that_may_have_no_text_yet_are_known(
    text: str, told: dict[str, object], more: list[bytes], whole: bool
) -> None:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None} | told
    client = Client(keep_text=True).answer(chat("x"), event(choices=[choice]), *more)
    assert client.transcript.is_whole is whole
