"""What the `anthropic` package gets from the proxy.

python anthropic_checks.py BASE_URL MODEL [LEFT_OUT..]
"""

import asyncio
import json
import sys
from typing import Any

import anthropic  # type: ignore[import-not-found]
from reporting import CITY_SCHEMA, raised, report

_USER = [{"role": "user", "content": "import os, sys"}]
_TOOL = {
    "name": "get_weather",
    "input_schema": CITY_SCHEMA,
}


class Checks:
    """All checks."""

    def __init__(self, base_url: str, model: str) -> None:
        self._client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
        self._url = base_url
        self._model = model

    def _values(self, **changes: Any) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": 16,
            "messages": _USER,
            "extra_body": {"temperature": 0.0},  # The package has no such argument any more.
        } | changes

    def message(self) -> None:
        answer = self._client.messages.create(**self._values())
        assert answer.content[0].text
        assert answer.stop_reason in ("max_tokens", "end_turn")
        assert 0 < answer.usage.output_tokens <= 16
        assert answer.usage.input_tokens > 2

    def system_and_turns(self) -> None:
        turns = [*_USER, {"role": "assistant", "content": "yes"}, *_USER]
        short = self._client.messages.create(**self._values())
        answer = self._client.messages.create(**self._values(system="Be brief.", messages=turns))
        assert _prompt_tokens(answer) > _prompt_tokens(short)

    def stream_is_the_whole_answer(self) -> None:
        whole = self._client.messages.create(**self._values())
        with self._client.messages.stream(**self._values()) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.stop_reason == whole.stop_reason

    def raw_events(self) -> None:
        kinds = [one.type for one in self._client.messages.create(**self._values(stream=True))]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"

    def tool_that_is_forced(self) -> None:
        values = self._values(tools=[_TOOL], tool_choice={"type": "any"}, max_tokens=200)
        answer = self._client.messages.create(**values)
        (block,) = [one for one in answer.content if one.type == "tool_use"]
        assert block.name == "get_weather"
        assert isinstance(block.input["city"], str)

    def tool_that_is_forced_streamed(self) -> None:
        values = self._values(tools=[_TOOL], tool_choice={"type": "any"}, max_tokens=200)
        with self._client.messages.stream(**values) as stream:
            final = stream.get_final_message()
        (block,) = [one for one in final.content if one.type == "tool_use"]
        assert isinstance(block.input["city"], str), json.dumps(block.input)

    def tool_that_was_used(self) -> None:
        call = {
            "type": "tool_use",
            "id": "toolu_1",
            "name": "get_weather",
            "input": {"city": "Oslo"},
        }
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "0"}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
        turns = [
            *_USER,
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result]},
        ]
        none = {"tools": [_TOOL], "tool_choice": {"type": "none"}}
        short = self._client.messages.create(**self._values(**none))
        answer = self._client.messages.create(**self._values(messages=turns, **none))
        assert answer.content[0].text
        assert _prompt_tokens(answer) > _prompt_tokens(short)

    def beta_messages(self) -> None:
        values = self._values(betas=["interleaved-thinking-2025-05-14"])
        with self._client.beta.messages.stream(**values) as stream:
            final = stream.get_final_message()
        assert (
            final.content[0].text == self._client.messages.create(**self._values()).content[0].text
        )

    def tokens_are_counted(self) -> None:
        counted = self._client.messages.count_tokens(model=self._model, messages=_USER)
        answer = self._client.messages.create(**self._values())
        assert counted.input_tokens == _prompt_tokens(answer)

    def error_400(self) -> None:
        for changes in (
            {"max_tokens": 0},
            {"extra_body": {"temperature": -1.0}},
            {"messages": "hello"},
        ):
            create = self._client.messages.create
            error = raised(
                anthropic.BadRequestError,
                lambda: create(**self._values(**changes)),  # noqa: B023 - called at once.
            )
            assert error.body["error"]["message"], changes  # vLLM's schema errors are OpenAI's.

    def error_404(self) -> None:
        create = self._client.messages.create
        error = raised(
            anthropic.NotFoundError, lambda: create(**self._values(model="claude-unknown"))
        )
        assert error.body["type"] == "error", error.body

    async def many_at_a_time(self) -> None:
        """Ask for 16 streams together."""
        async with anthropic.AsyncAnthropic(base_url=self._url, api_key="none") as client:

            async def ask() -> str:
                async with client.messages.stream(**self._values()) as stream:
                    return str(await stream.get_final_text())

            texts = await asyncio.gather(*(ask() for _ in range(16)))
        assert len(set(texts)) == 1
        assert texts[0]


def _prompt_tokens(answer: Any) -> int:
    """Return the tokens of the prompt; those of a cache are counted apart."""
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return int(usage.input_tokens + cached)


if __name__ == "__main__":
    sys.exit(report(anthropic.__version__, Checks(*sys.argv[1:3]), *sys.argv[3:]))
