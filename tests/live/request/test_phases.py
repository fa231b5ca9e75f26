"""The phases of a request: what leads where."""

import json

import pytest
from tests.live.request.session_site import (
    DONE,
    HANDED_BACK,
    LAST,
    Sent,
    Site,
    prefill_answer,
    token,
)

from balanceroute.proxy.core import events
from balanceroute.proxy.live.request.phases import TRANSITIONS, Phase
from balanceroute.proxy.live.telemetry.record import Outcome


def test_every_phase_can_be_reached_and_may_end_at_once() -> None:
    reached, found = {Phase.QUEUED}, {Phase.QUEUED}
    while found:
        found = {to for phase in found for to in TRANSITIONS[phase]} - reached
        reached |= found
    assert reached == set(Phase)
    assert all(Phase.ENDED in ways for phase, ways in TRANSITIONS.items() if ways)


def test_nothing_comes_after_the_end() -> None:
    assert not TRANSITIONS[Phase.ENDED]


def test_only_an_attempt_fails_into_a_backoff_and_no_stream_that_began_does() -> None:
    sources = {phase for phase, ways in TRANSITIONS.items() if Phase.BACKOFF in ways}
    assert sources == {Phase.PREFILLING, Phase.DECODING}


# A request that its rank hands back in the middle: it goes on with what it emitted, or ends truly.


NUMBER = events.RequestId(3)
ERROR = b'{"error":{"message":"no","type":"x"}}'


def handing_back() -> tuple[Site, Sent]:
    site = Site(connector="mooncake-ascend")
    return site, site.to_rank()


def test_a_request_that_is_handed_back_goes_on_with_what_it_emitted() -> None:
    site, leg = handing_back()
    leg.begin(token("x"), token("y"))
    assert not site.client.released  # It may have to be sent again.
    leg.more(HANDED_BACK)
    assert leg.aborted
    assert site.is_in(Phase.QUEUED)
    assert site.fed[-1] == events.RequestRecomputed(NUMBER)
    assert site.session.emitted_tokens == 2
    assert site.session.record.recomputes == 1
    probe = site.prefill(1)
    assert probe.values["prompt"] == "a bxy"
    probe.answer(200, prefill_answer())
    leg = site.decode(1)
    assert (leg.values["prompt"], leg.values["max_tokens"]) == ("a bxy", 7)
    leg.stream(token("v"), LAST, DONE)
    assert site.client.body == token("x") + token("y") + token("v") + LAST + DONE
    assert site.client.over == "ended"
    record = site.session.record
    assert (record.outcome, record.output_tokens, record.prompt_tokens) == (Outcome.OK, 4, 7)


@pytest.mark.parametrize("how", ["told", "ended", "broken off"])
def test_the_total_of_a_request_that_is_handed_back_is_awaited_where_no_event_tells_it(
    how: str,
) -> None:
    site = Site(connector="mooncake-ascend", count_tokens="usage")
    for rank in site.ranks:
        rank.continuous_usage_is_expensive = True
    leg = site.to_rank()
    leg.begin(token("x"), token("y"), HANDED_BACK)
    assert site.is_in(Phase.STREAMING)
    if how == "told":
        usage = {"prompt_tokens": 2, "total_tokens": 6, "completion_tokens": 4}
        leg.more(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
    elif how == "ended":
        leg.end()
    else:
        leg.break_off()
    assert site.is_in(Phase.QUEUED)
    assert site.fed[-1] == events.RequestRecomputed(NUMBER)
    # Without it, an event is a token.
    assert site.session.emitted_tokens == (4 if how == "told" else 2)
    assert site.prefill(1).values["prompt"] == "a bxy"
    assert not site.blamed


def test_a_request_that_is_handed_back_before_it_began_starts_afresh_elsewhere() -> None:
    site, leg = handing_back()
    leg.begin(HANDED_BACK)
    assert site.fed[-1] == events.RequestRecomputed(NUMBER, elsewhere=True)
    assert site.prefill().values["prompt"] == "a b"
    assert site.client.status == 0


@pytest.mark.parametrize("text", ["", "x"])
@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"logprobs": 0}, {"logprobs": {"tokens": ["\ufffd"], "token_logprobs": [-0.5]}}),
        ({"return_token_ids": True}, {"token_ids": [5]}),
    ],
)
def test_a_token_that_was_told_without_its_text_is_not_told_again(
    text: str, members: dict[str, object], told: dict[str, object]
) -> None:
    site = Site(connector="mooncake-ascend", members=members)
    told_events = [token(text, **told)] if text else []
    told_events.append(token("", **told))
    site.to_rank().begin(*told_events, HANDED_BACK)
    body = site.client.body
    assert body.startswith(b"".join(told_events))
    error = json.loads(body.split(b"data: ")[-1])["error"]
    assert error["code"] == 502
    assert "tokens that the client was told of may have no text yet" in error["message"]
    assert site.client.over == "aborted"
    assert site.is_in(Phase.ENDED)
    assert site.at_rest


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"logprobs": 0}, {"logprobs": {"tokens": ["x", "\ufffd"], "token_logprobs": [-0.5, -1]}}),
        ({"return_token_ids": True}, {"token_ids": [5, 6]}),
    ],
)
def test_of_several_tokens_in_one_event_the_last_may_have_no_text_yet(
    members: dict[str, object], told: dict[str, object]
) -> None:
    site = Site(connector="mooncake-ascend", members=members)
    site.to_rank().begin(token("x", **told), HANDED_BACK)
    assert site.client.body.startswith(token("x", **told))
    error = json.loads(site.client.body.split(b"data: ")[-1])["error"]
    assert "may have no text yet" in error["message"]
    assert site.at_rest


def test_a_token_without_text_of_which_the_client_has_nothing_may_come_again() -> None:
    site, leg = handing_back()
    leg.begin(token(""), HANDED_BACK)
    assert site.prefill().values["prompt"] == "a b"
    assert site.client.body == token("")


def test_a_prompt_that_ends_at_once_behind_an_open_stream_is_computed_where_it_is_decoded() -> None:
    site, leg = handing_back()
    # A chat's first event has no token yet.
    opening = b'data: {"choices":[{"index":0,"text":""}],"usage":{"completion_tokens":0}}\n\n'
    leg.begin(opening)
    site.wait(0.3)
    assert site.client.status == 200
    leg.more(HANDED_BACK)
    assert site.session.emitted_tokens == 0
    site.prefill().answer(200, prefill_answer(None, finish_reason="stop"))
    leg = site.decode(1)
    assert "kv_transfer_params" not in leg.values
    leg.stream(LAST, DONE)
    assert site.client.body == opening + LAST + DONE
    assert site.client.over == "ended"


def test_a_prefill_that_fails_behind_an_open_stream_is_mended_and_a_decode_leg_is_not() -> None:
    site, leg = handing_back()
    leg.begin(token("x"), HANDED_BACK)
    site.prefill().answer(500, ERROR)
    site.back_off()
    site.prefill(1).answer(200, prefill_answer())
    site.decode().answer(503, ERROR)
    assert json.loads(site.client.body.split(b"data: ")[-1])["error"]["code"] == 502
    assert site.client.over == "aborted"
    assert site.session.record.output_tokens == 1


def test_a_request_is_not_handed_back_for_ever() -> None:
    site, leg = handing_back()
    for _ in range(32):
        leg.begin(HANDED_BACK)
        leg = site.to_rank()
    leg.begin(HANDED_BACK)
    assert site.client.status == 502
    assert site.session.record.reason == "the engine dropped the request 32 times"
