"""What `langchain-openai` and `langchain-anthropic` get from the proxy.

python langchain_checks.py BASE_URL MODEL [LEFT_OUT..]
"""

import importlib.metadata
import sys
from typing import Any

import openai  # type: ignore[import-not-found]
from langchain_anthropic import ChatAnthropic  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]
from reporting import CITY_SCHEMA, raised, report

_SCHEMA = {"title": "Answer", "description": "What the weather is like."} | CITY_SCHEMA


class Checks:
    """All checks."""

    def __init__(self, base_url: str, model: str) -> None:
        self._values: dict[str, Any] = {
            "base_url": f"{base_url}/v1",
            "api_key": "none",
            "model": model,
            "max_tokens": 16,
            "temperature": 0.0,
            "max_retries": 0,
        }

    def _chat(self, **changes: Any) -> Any:
        return ChatOpenAI(**(self._values | changes))

    def invoke(self) -> None:
        answer = self._chat().invoke("import os, sys")
        assert answer.content
        assert 0 < answer.usage_metadata["output_tokens"] <= 16

    def stream_is_the_whole_answer_with_usage(self) -> None:
        whole = self._chat().invoke("import os, sys")
        chunks = list(self._chat(stream_usage=True).stream("import os, sys"))
        assert "".join(chunk.content for chunk in chunks) == whole.content
        used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
        assert used[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]

    def batch(self) -> None:
        answers = self._chat().batch([f"def f{i}(): pass" for i in range(8)])
        assert all(answer.content for answer in answers)

    async def stream_without_waiting(self) -> None:
        """Stream by the asynchronous interface."""
        text = ""
        async for chunk in self._chat().astream("import os, sys"):
            text += chunk.content
        assert text

    def completion(self) -> None:
        assert OpenAI(**self._values).invoke("for line in file:")

    def tool_that_is_required(self) -> None:
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": _SCHEMA}}
        bound = self._chat(max_tokens=200).bind_tools([tool], tool_choice="required")
        (call,) = bound.invoke("What is the weather in Oslo?").tool_calls
        assert call["name"] == "get_weather"
        assert isinstance(call["args"]["city"], str)

    def structured_output_by_a_tool(self) -> None:
        asked = self._chat(max_tokens=200).with_structured_output(
            _SCHEMA, method="function_calling"
        )
        assert isinstance(asked.invoke("What is the weather in Oslo?")["city"], str)

    def responses(self) -> None:
        whole = self._chat(use_responses_api=True).invoke("import os, sys")
        assert whole.text
        assert 0 < whole.usage_metadata["output_tokens"] <= 16
        chunks = list(self._chat(use_responses_api=True).stream("import os, sys"))
        assert "".join(chunk.text for chunk in chunks) == whole.text

    def messages(self) -> None:
        values = {"model": self._values["model"], "max_tokens": 16, "api_key": "none"}
        url = self._values["base_url"].removesuffix("/v1")
        chat = ChatAnthropic(**values, base_url=url, max_retries=0)
        assert chat.invoke("import os, sys").text
        assert "".join(chunk.text for chunk in chat.stream("import os, sys"))

    def errors(self) -> None:
        raised(openai.BadRequestError, lambda: self._chat(temperature=-1.0).invoke("a"))
        raised(openai.NotFoundError, lambda: self._chat(model="gpt-9").invoke("a"))


if __name__ == "__main__":
    sys.exit(
        report(
            importlib.metadata.version("langchain-openai"), Checks(*sys.argv[1:3]), *sys.argv[3:]
        )
    )
