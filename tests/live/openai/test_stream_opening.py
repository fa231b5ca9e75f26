"""The beginning of a stream, before which nothing may commit the answer."""

import re

import pytest
from tests.live.stream_client import DONE, ERROR, GONE, OPENING, Client, chat, event, in_pieces
from tests.support.site import transcript

from balanceroute.proxy.live.openai.stream_reader import StreamOpening

ROLE = {"role": "assistant", "content": ""}


@pytest.mark.parametrize("hold", [b"\n", b"id: 1\n\n", b": a\nid: 1\n\n", b"retry: 1\n\n"])
@pytest.mark.parametrize("openai", [True, False])
def test_a_heartbeat_does_not_pass_for_a_first_token(hold: bytes, *, openai: bool) -> None:
    client = Client(openai=openai).answer(hold, hold)
    assert not client.leg.started
    assert not client.turns
    client.leg.on_data(chat())
    client.leg.on_data(hold)
    assert client.received == hold + hold + chat() + hold


@pytest.mark.parametrize("remark", [b": ping\n\n", b":\r\n: a\r\n\r\n", b":\r\r"])
def test_a_comment_goes_to_the_client_at_once_and_begins_nothing(remark: bytes) -> None:
    client = Client().answer(remark, remark + chat())
    assert client.turns == ["remarked", "remarked", "started", "wrote"]
    assert client.received == remark + remark + chat()


@pytest.mark.parametrize(
    "ping", [b"event: ping\n\n", b'event: ping\r\ndata: {"type":"ping"}\r\n\r\n']
)
def test_a_ping_is_a_comment_where_events_have_names(ping: bytes) -> None:
    client = Client(openai=False).answer(ping, ping + chat())
    assert client.turns == ["remarked", "remarked", "started", "wrote"]


def test_heartbeats_before_a_first_error_commit_nothing() -> None:
    client = Client().answer(b": ping\n\n", b": ping\n\n" + ERROR)
    assert client.turns == ["remarked", "remarked", "error first"]
    client = Client().answer(b"id: 1\n\n", b"id: 2\n\n" + ERROR)
    assert client.turns == ["error first"]


def test_an_error_first_is_told_and_not_sent() -> None:
    body = transcript("nixl_pd_prefiller_dead_stream.resp")
    first, rest = body[: body.index(b"\n\n") + 2], body[body.index(b"\n\n") + 2 :]
    for pieces in ([body], [first, rest], in_pieces(body, 1)):
        client = Client().answer(*pieces).end()
        assert client.turns == ["error first"]
        assert client.first_errors == [first]


def test_an_error_right_behind_the_first_token_is_a_later_one() -> None:
    client = Client().answer(chat() + ERROR + DONE).end()
    assert client.received == chat() + ERROR + DONE
    assert client.turns == ["started", "wrote", "error: Internal server error"]


# vLLM's frontend in Rust tells the prompt alone; other servers tell what a filter thinks of it.
PROMPT = event(choices=[{"index": 0, "text": "", "prompt_token_ids": [1, 2]}])
SECOND = OPENING.replace(b'"index":0', b'"index":1')
FILTER = event(choices=[], prompt_filter_results=[])


@pytest.mark.parametrize("opening", [OPENING, PROMPT, FILTER, OPENING + SECOND, FILTER + OPENING])
@pytest.mark.parametrize("together", [True, False])
def test_what_brings_nothing_of_the_answer_waits_for_what_follows(
    opening: bytes, *, together: bool
) -> None:
    pieces = [opening] if together else re.findall(rb"data: .*\n\n", opening)
    for behind, turn in ((ERROR, "error first"), (chat("", "abort"), "aborted")):
        assert Client(sequences=2).answer(*pieces, behind).turns == [turn]
    broken = Client(sequences=2).answer(*pieces)
    broken.leg.on_error(GONE)
    assert (broken.turns, broken.leg.started) == (["broken"], False)
    client = Client(sequences=2).answer(*pieces, b": ping\n\n", chat(), ERROR)
    assert client.received == b": ping\n\n" + opening + chat() + ERROR
    assert client.turns[:3] == ["remarked", "started", "wrote"]
    assert client.tokens == 1


@pytest.mark.parametrize(
    "opening",
    [
        OPENING,
        PROMPT,
        OPENING + SECOND,
        event(choices=[{"index": 0, "delta": {"content": "", "role": "assistant"}}]),
    ],
)
def test_what_opens_an_answer_goes_on_if_nothing_follows(opening: bytes) -> None:
    client = Client(sequences=2).answer(opening)
    client.leg.release(client.now_s + 0.1)
    assert client.turns == []
    client.leg.release(client.now_s + 0.3)
    client.leg.release(client.now_s + 0.6)
    assert (client.received, client.turns) == (opening, ["started", "wrote"])
    client.answer(chat(), ERROR)
    assert client.received == opening + chat() + ERROR
    assert client.turns[-1] == "wrote"


def test_an_opening_of_which_nothing_is_the_clients_begins_nothing() -> None:
    opening = StreamOpening(resumes=False)
    assert opening.open(b"", begins=True) == b""
    assert not opening.waits


def test_a_large_opening_does_not_wait() -> None:
    large = event(prompt_token_ids=[7] * 3_000_000, choices=[{"index": 0, "delta": ROLE}])
    assert Client().answer(large).received == large


def test_what_nobody_can_read_is_held_in_part_and_nothing_of_it_is_lost() -> None:
    odd = b"data: {" + bytes(40_000) + b"\n\n"
    client = Client().answer(OPENING, odd)
    assert client.turns == []
    assert client.answer(odd, chat()).received == OPENING + 2 * odd + chat()


def test_the_first_event_of_a_resumed_answer_is_not_the_first_of_the_answer() -> None:
    client = Client(resumed_tokens=3).answer(ERROR, DONE).end()
    assert client.received == ERROR + DONE
    assert client.turns[-1] == "error: Internal server error"


def test_what_was_held_comes_once_before_the_first_event() -> None:
    opening = StreamOpening(resumes=False)
    assert opening.pass_empty(b": a\n\n") == b""
    assert opening.begin(b"") == b""
    assert opening.begin(b"1") == b": a\n\n1"
    assert opening.begin(b"2") == b"2"
    assert opening.pass_empty(b": b\n\n") == b": b\n\n"


def test_of_signs_of_life_without_end_only_the_first_are_kept() -> None:
    opening = StreamOpening(resumes=False)
    sign = b":" + bytes(998) + b"\n"
    for _ in range(100):
        assert opening.pass_empty(sign) == b""
    assert opening.begin(b"1") == sign * 65 + b"1"
    assert opening.pass_empty(sign) == sign


def test_a_sign_of_life_is_not_held_for_a_stream_that_is_open() -> None:
    """Else it came with the first token that the client has already, as if that were news."""
    opening = StreamOpening(resumes=True)
    assert opening.pass_empty(b": a\n\n") == b""
    assert opening.begin(b"1") == b"1"
    assert opening.pass_empty(b": b\n\n") == b": b\n\n"


@pytest.mark.parametrize(("resumes", "passed"), [(False, b""), (True, ERROR)])
def test_an_error_is_the_first_event_only_of_a_new_answer(*, resumes: bool, passed: bytes) -> None:
    opening = StreamOpening(resumes=resumes)
    assert opening.pass_error(ERROR) == passed
    assert bool(opening.error) is not resumes
