"""Lengths of answers that a load generator tells: who keeps to them, and what is refused."""

from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, COMPLETIONS, Lab, emulated

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate import tokens
from balanceroute.proxy.lab.emulate.tokens import AnswerLengths

VALUES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "t1 t2", "max_tokens": 40},
    CHAT: {"messages": [{"role": "user", "content": "t1 t2"}]},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}], ids=["plain", "not plain"])
@pytest.mark.parametrize("length", [1, 2, 39, 40])
@emulated()
async def test_an_answer_has_as_many_tokens_as_were_told_and_ends_by_itself(
    lab: Lab, path: str, extra: dict[str, Any], length: int
) -> None:
    answer = await lab.post("prefill/0", "/emulation/lengths", {"a-1": length, "b": 3})
    assert answer.json == {"lengths": 2}
    values = VALUES[path] | (extra if path == COMPLETIONS else {})
    for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        answer = await lab.post("decode/1", path, values | stream, {"X-Request-Id": "a-1"})
        usage = (answer.chunks[-1] if stream else answer.json)["usage"]
        assert usage["completion_tokens"] == length
        assert lab.fleet.idle
        chunks = [chunk for chunk in answer.chunks if chunk["choices"]] if stream else []
        ends = [one["choices"][0]["finish_reason"] for one in chunks or [answer.json]]
        assert ends[-1] == "stop"


@emulated()
async def test_a_limit_cuts_what_was_told(lab: Lab) -> None:
    lab.fleet.lengths.add({"a": 41})
    answer = await lab.post("decode/0", COMPLETIONS, VALUES[COMPLETIONS], {"X-Request-Id": "a"})
    assert answer.json["usage"]["completion_tokens"] == 40
    assert answer.reasons()[0] == "length"


@emulated(mean_output_tokens=2.0)
async def test_a_prefill_leaves_the_length_to_decode(lab: Lab) -> None:
    values = VALUES[COMPLETIONS]
    for number in range(60):  # Of mean length 2, half of all texts end with their first token.
        lab.fleet.lengths.add({f"a-{number}": 1 + number})
        values = {"prompt": f"t1 t{number}", "max_tokens": 100}
        decode = await lab.prefilled(COMPLETIONS, values, request_id=f"a-{number}")
        answer = await lab.post("decode/0", COMPLETIONS, decode, {"X-Request-Id": f"a-{number}"})
        assert answer.json["usage"]["completion_tokens"] == 1 + number


@emulated()
async def test_a_request_that_is_handed_back_goes_on_with_what_is_left(lab: Lab) -> None:
    lab.fleet.lengths.add({"a": 12})
    lab.fleet.faults.set("decode/0", recomputed_after_tokens=5)
    values, name = VALUES[COMPLETIONS], {"X-Request-Id": "a"}
    first = await lab.post("decode/0", COMPLETIONS, values, name)
    assert first.reasons() == ("stop", "recomputed")
    second = await lab.post("decode/1", COMPLETIONS, values, name)
    assert second.json["usage"]["completion_tokens"] == 12 - 5


@pytest.mark.parametrize("count", [0, -1, 2**31, True, 1.0, "7", None])
def test_a_length_that_is_none_is_refused_and_none_is_noted(count: object) -> None:
    table = AnswerLengths()
    with pytest.raises(ConfigError, match=r"'b': .* is not from 1 to 2147483647"):
        table.add({"a": 1, "b": count})
    assert table.of("a") is None


def test_the_oldest_lengths_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_LENGTHS", 2)
    table = AnswerLengths()
    table.add({"a": 1, "b": 2})
    table.add({"c": 3})
    assert [table.of(name) for name in "abc"] == [None, 2, 3]


@emulated()
async def test_a_length_is_found_behind_a_router_that_replaces_the_header(lab: Lab) -> None:
    lab.fleet.lengths.add({"a": 12})
    lab.fleet.faults.set("decode/0", recomputed_after_tokens=5)
    values = VALUES[COMPLETIONS] | {"request_id": "a"}
    first = await lab.post("decode/0", COMPLETIONS, values, {"X-Request-Id": "router-1"})
    assert first.json["id"] == "cmpl-router-1"  # As in vLLM the header goes first.
    assert first.json["usage"]["completion_tokens"] == 5
    second = await lab.post("decode/1", COMPLETIONS, values, {"X-Request-Id": "router-2"})
    assert second.json["usage"]["completion_tokens"] == 12 - 5
