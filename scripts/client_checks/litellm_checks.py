"""What the `litellm` package gets from the proxy, by either of its APIs.

python litellm_checks.py BASE_URL MODEL [LEFT_OUT..]
"""

import asyncio
import importlib.metadata
import json
import os
import sys
from typing import Any

# Else it asks the network for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # type: ignore[import-not-found]
from reporting import CITY_SCHEMA, raised, report

_USER = [{"role": "user", "content": "class Reader(io.IOBase):"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": CITY_SCHEMA,
    },
}


class Checks:
    """All checks."""

    def __init__(self, base_url: str, model: str) -> None:
        litellm.suppress_debug_info = True
        litellm.telemetry = False
        self._url = base_url
        self._model = model

    def _values(self, **changes: Any) -> dict[str, Any]:
        return {
            "model": f"hosted_vllm/{self._model}",
            "api_base": f"{self._url}/v1",
            "api_key": "none",
            "messages": _USER,
            "max_tokens": 16,
            "temperature": 0.0,
            "num_retries": 0,
        } | changes

    def completion(self) -> None:
        answer = litellm.completion(**self._values())
        assert answer.choices[0].message.content
        assert 0 < answer.usage.completion_tokens <= 16

    def stream_is_the_whole_answer_with_usage(self) -> None:
        whole = litellm.completion(**self._values())
        options = {"stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(**self._values(stream=True, **options)))
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text == whole.choices[0].message.content
        used = [one.usage for one in chunks if getattr(one, "usage", None)]
        assert used[-1].completion_tokens == whole.usage.completion_tokens

    def text_completion(self) -> None:
        values = self._values(prompt="for line in file:")
        del values["messages"]
        values["model"] = f"text-completion-openai/{self._model}"
        assert litellm.text_completion(**values).choices[0].text

    def tool_that_is_required(self) -> None:
        values = self._values(tools=[_TOOL], tool_choice="required", max_tokens=200)
        (call,) = litellm.completion(**values).choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)

    def anthropic_messages(self) -> None:
        values = self._values(model=f"anthropic/{self._model}", api_base=self._url)
        assert litellm.completion(**values).choices[0].message.content

    def anthropic_messages_streamed(self) -> None:
        values = self._values(model=f"anthropic/{self._model}", api_base=self._url, stream=True)
        whole = litellm.completion(**self._values()).choices[0].message.content
        chunks = litellm.completion(**values)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole

    def responses(self) -> None:
        values: dict[str, Any] = {
            "model": f"openai/{self._model}",
            "api_base": f"{self._url}/v1",
            "api_key": "none",
        }
        values |= {"input": "import os, sys", "max_output_tokens": 16, "temperature": 0.0}
        whole = litellm.responses(**values)
        text = whole.output[0].content[0].text
        assert text
        said = [
            event.delta
            for event in litellm.responses(**values, stream=True)
            if event.type == "response.output_text.delta"
        ]
        assert "".join(said) == text

    def errors(self) -> None:
        raised(litellm.BadRequestError, lambda: litellm.completion(**self._values(max_tokens=0)))
        unknown = self._values(model="hosted_vllm/gpt-9")
        raised(litellm.NotFoundError, lambda: litellm.completion(**unknown))

    async def many_at_a_time(self) -> None:
        """Ask for 16 answers together."""
        answers = await asyncio.gather(*(litellm.acompletion(**self._values()) for _ in range(16)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1


if __name__ == "__main__":
    sys.exit(report(importlib.metadata.version("litellm"), Checks(*sys.argv[1:3]), *sys.argv[3:]))
