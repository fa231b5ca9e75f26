"""The last token of a stream, and the total that its client did not ask for."""

import json

import pytest
from tests.live.stream_client import DONE, ERROR, GONE, Client, chunk, counts, total, usage

from balanceroute.proxy.live.openai.completion_stream import HeldEnd


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
