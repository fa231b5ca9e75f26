"""Answers of a real engine, reduced to what two engines must agree on, and compared."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from client import CLIENT

EMPTY_CALL = "{}"
"""What vLLM 0.32 may add to the arguments of a streamed call, if its last token comes with the end."""

# Of log-probabilities: the same sums in another order.
_CLOSE = 2e-3


def ask(
    url: str,
    path: str,
    body: dict[str, Any],
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 120.0,
) -> Any:
    """Return what a request is answered: its object, or the list of its events' objects.

    Raises:
        AssertionError: The answer is an error, or a stream that does not end as it should.
    """
    answer = CLIENT.post(f"{url}{path}", json=body, headers=dict(headers), timeout=timeout_s)
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
    if not body.get("stream"):
        return answer.json()
    events = [event for event in answer.text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]", f"the stream ends with {events[-1][:200]!r}"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def essence(answer: Any) -> list[Any]:
    """Return the choices of an answer and its usage; a stream's pieces are joined."""
    if isinstance(answer, dict):
        choices = {choice["index"]: _whole(choice) for choice in answer["choices"]}
        usage = answer.get("usage")
    else:
        choices, usage = {}, None
        for event in answer:
            assert "error" not in event, f"the stream says {event['error']}"
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                _append(choices.setdefault(choice["index"], {}), choice)
    for choice in choices.values():
        for call in choice["calls"].values():
            call["arguments"] = call["arguments"].removesuffix(EMPTY_CALL)
    counts = usage and (usage["prompt_tokens"], usage["completion_tokens"])
    return [counts, [choices[index] for index in sorted(choices)]]


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    _append(joined, choice | {"delta": choice.get("message")})
    return joined


def _append(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    joined["text"] = joined.get("text", "") + (delta.get("content") or choice.get("text") or "")
    joined["thought"] = joined.get("thought", "") + (delta.get("reasoning") or "")
    joined["reason"] = choice.get("finish_reason") or joined.get("reason")
    calls = joined.setdefault("calls", {})
    for place, call in enumerate(delta.get("tool_calls") or ()):
        known = calls.setdefault(call.get("index", place), {"name": "", "arguments": ""})
        known["name"] += call["function"].get("name") or ""
        known["arguments"] += call["function"].get("arguments") or ""
    logprobs = choice.get("logprobs")
    if logprobs:
        joined.setdefault("logprobs", []).extend(_logprobs(logprobs))


def _logprobs(logprobs: dict[str, Any]) -> list[tuple[str, float]]:
    if "content" in logprobs:
        return [(one["token"], one["logprob"]) for one in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare two essences; log-probabilities may differ by rounding."""
    for one, other in zip(ours[1], theirs[1], strict=True):
        mine, its = one.pop("logprobs", []), other.pop("logprobs", [])
        assert [token for token, _ in mine] == [token for token, _ in its]
        for (token, first), (_, second) in zip(mine, its, strict=True):
            assert abs(first - second) < _CLOSE, f"{token!r}: {first} and {second}"
    assert ours == theirs, f"{ours} and {theirs}"
