"""What must hold of /inference/v1/generate: token ids in and out, through prefill and decode legs."""

from collections.abc import Iterator
from typing import Any

from answers import ask, assert_equal, essence
from engines import BLOCK_TOKENS
from fleet import SUCCESSES, Fleet

GENERATE = "/inference/v1/generate"
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_EACH = {"include_usage": True, "continuous_usage_stats": True}
# Around the end of a block, where a KV cache of the wrong length would show.
_LENGTHS = (7, BLOCK_TOKENS - 1, BLOCK_TOKENS, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1)


def requests() -> Iterator[dict[str, Any]]:
    """Yield bodies, each streamed and not."""
    kinds: list[dict[str, Any]] = [
        {},
        {"output_mode": "text"},
        {"output_mode": "text", "sampling_params": {"logprobs": 2}},
        {"return_token_ids": True, "sampling_params": {"logprobs": 2}},
        {"sampling_params": {"temperature": 1.0, "seed": 5}},
        {"sampling_params": {"stop_token_ids": list(range(0, 2_000, 3))}},
        {"output_mode": "text", "sampling_params": {"stop": ["e"]}},
        {"sampling_params": {"max_tokens": 1}},
        {"sampling_params": {"n": 2, "temperature": 1.0, "seed": 5}},
    ]
    body: dict[str, Any] = {}
    for length in _LENGTHS:
        for number, kind in enumerate(kinds):
            sampling = {"max_tokens": 16, "temperature": 0} | kind.get("sampling_params", {})
            ids = [300 + number, *range(400, 399 + length)]
            body = kind | {"model": "tiny", "token_ids": ids, "sampling_params": sampling}
            yield body
            yield body | _STREAM
    yield body | _STREAM | {"stream_options": _EACH}


def ids_of(answer: Any) -> list[list[int]]:
    """Return the ids of each choice, and those of the prompt."""
    said: dict[int, list[int]] = {}
    for message in answer if isinstance(answer, list) else [answer]:
        said.setdefault(-1, []).extend(message.get("prompt_token_ids") or [])
        for choice in message["choices"]:
            said.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
    return [said[index] for index in sorted(said)]


def said_by(answer: Any) -> Any:
    """Return what two engines must agree on, but for the log-probabilities of ids."""
    for message in answer if isinstance(answer, list) else [answer]:
        for choice in message["choices"]:
            content = (choice.get("logprobs") or {}).get("content") or []
            for one in content:
                one.setdefault("token", str(one.get("token_id")))
    return essence(answer)


class TokenChecks:
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefiller = fleet.prefillers[0]

    def check_token_ids_in_and_out_are_one_engines(self) -> str:
        before = self._decoded()
        asked = list(requests())
        with self._fleet.proxy("tokens") as proxy:
            for body in asked:
                ours, theirs = (
                    ask(url, GENERATE, body) for url in (proxy.url, self._prefiller.url)
                )
                try:
                    assert ids_of(ours) == ids_of(theirs), f"{ids_of(ours)} and {ids_of(theirs)}"
                    assert_equal(said_by(ours), said_by(theirs))
                except AssertionError as error:
                    raise AssertionError(f"{body}: {error}") from None
        decoded = self._decoded() - before
        assert decoded > len(asked) // 2, f"ranks decoded {decoded} of {len(asked)}"
        return f"{len(asked)} requests, {decoded:.0f} of them decoded by ranks"

    def _decoded(self) -> float:
        return sum(engine.metric(SUCCESSES) for engine in self._fleet.decoders)
