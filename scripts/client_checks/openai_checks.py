"""What the `openai` package gets from the proxy before emulated engines.

    python openai_checks.py BASE_URL ADMIN_URL STRICT_URL KEY

STRICT_URL is a proxy that asks for a key and whose queue is tiny.
"""

import asyncio
import json
import sys
import time
import urllib.request
from typing import Any

import openai  # type: ignore[import-not-found]
from reporting import raised, report

MODEL = "emulated"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_FREED_S = 2.0
_LONG = 100_000  # Tokens: an answer that takes an hour.


def say(text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


class Checks:
    """All checks. The name of a method is what it claims.

    Args:
        base_url: The proxy's.
        admin_url: Its admin listener's.
        strict_url: The proxy with a key and a tiny queue.
        key: Its key.
    """

    def __init__(self, base_url: str, admin_url: str, strict_url: str, key: str) -> None:
        self._url = f"{base_url}/v1"
        self._admin_url = admin_url
        self._strict_url = f"{strict_url}/v1"
        self._key = key
        self._client = openai.OpenAI(base_url=self._url, api_key="none", max_retries=0)

    def _chat(self, text: str, **values: Any) -> Any:
        values.setdefault("max_tokens", 20)
        return self._client.chat.completions.create(model=MODEL, messages=say(text), **values)

    def _decoding(self) -> int:
        with urllib.request.urlopen(f"{self._admin_url}/admin/state") as page:  # noqa: S310 - http.
            return int(json.load(page)["state"]["decoding"])

    def _wait_until_free(self) -> None:
        end_s = time.monotonic() + _FREED_S
        while self._decoding():
            assert time.monotonic() < end_s, "a slot is still taken"
            time.sleep(0.02)

    def models_are_listed(self) -> None:
        assert [model.id for model in self._client.models.list()] == [MODEL]

    def chat(self) -> None:
        answer = self._chat("hello there")
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert 0 < answer.usage.completion_tokens <= 20
        assert answer.usage.prompt_tokens > 2

    def completion(self) -> None:
        answer = self._client.completions.create(model=MODEL, prompt="once upon", max_tokens=8)
        assert answer.choices[0].text
        assert answer.usage.completion_tokens <= 8

    def completion_of_token_ids(self) -> None:
        answer = self._client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=4)
        assert answer.usage.prompt_tokens == 3

    def stream_is_the_whole_answer_with_usage(self) -> None:
        values = {"max_tokens": 60, "temperature": 0}  # Two samples need not be the same.
        whole = self._chat("tell me", **values)
        options = {"include_usage": True}
        chunks = list(self._chat("tell me", stream=True, stream_options=options, **values))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert not chunks[-1].choices
        assert all(chunk.usage is None for chunk in chunks[:-1])

    def stream_without_usage(self) -> None:
        chunks = list(self._chat("tell me", stream=True))
        assert all(chunk.usage is None for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")

    def completion_stream(self) -> None:
        stream = self._client.completions.create(
            model=MODEL, prompt="once", max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream)

    def n_2(self) -> None:
        answer = self._chat("two of them", n=2, temperature=1.0)
        first, second = answer.choices
        assert first.message.content != second.message.content
        seen = {0: "", 1: ""}
        for chunk in self._chat("two of them", n=2, temperature=1.0, stream=True):
            for choice in chunk.choices:
                seen[choice.index] += choice.delta.content or ""
        assert [seen[0], seen[1]] == [first.message.content, second.message.content]

    def logprobs(self) -> None:
        answer = self._chat("how sure", logprobs=True, top_logprobs=3)
        entries = answer.choices[0].logprobs.content
        assert len(entries) == answer.usage.completion_tokens
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
        done = self._client.completions.create(model=MODEL, prompt="a", max_tokens=4, logprobs=2)
        assert len(done.choices[0].logprobs.tokens) == done.usage.completion_tokens

    def stop(self) -> None:
        words = self._chat("stop early").choices[0].message.content.split()
        answer = self._chat("stop early", stop=[words[5]])
        assert answer.choices[0].finish_reason == "stop"
        assert words[5] not in answer.choices[0].message.content

    def tools_auto(self) -> None:
        reasons = set()
        for number in range(12):
            answer = self._chat(f"weather {number}", tools=[WEATHER], max_tokens=100)
            choice = answer.choices[0]
            reasons.add(choice.finish_reason == "tool_calls")
            if choice.finish_reason == "tool_calls":
                call = choice.message.tool_calls[0]
                assert call.function.name == "get_weather"
                assert "city" in json.loads(call.function.arguments)
            else:
                assert choice.message.content
        assert reasons == {True, False}, "the emulated model calls about every second time"

    def tools_named(self) -> None:
        chosen = {"type": "function", "function": {"name": "get_weather"}}
        answer = self._chat("weather", tools=[WEATHER], tool_choice=chosen, max_tokens=100)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["days"], int)

    def tools_streamed(self) -> None:
        chosen = {"type": "function", "function": {"name": "get_weather"}}
        for choice in (chosen, "required"):
            values = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100}
            whole = self._chat("weather", **values).choices[0].message.tool_calls[0]
            name, arguments = "", ""
            for chunk in self._chat("weather", **values, stream=True):
                for call in chunk.choices[0].delta.tool_calls or []:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
            assert (name, arguments) == (whole.function.name, whole.function.arguments)

    def stream_helper(self) -> None:
        # It takes an answer that ends with its limit for an error.
        words = self._chat("with the helper").choices[0].message.content.split()
        with self._client.chat.completions.stream(
            model=MODEL, messages=say("with the helper"), max_tokens=20, stop=[words[8]]
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content.split() == words[:8]

    def _respond(self, text: Any, **values: Any) -> Any:
        values.setdefault("max_output_tokens", 20)
        return self._client.responses.create(model=MODEL, input=text, **values)

    def response(self) -> None:
        answer = self._respond("hello there", instructions="Be brief.")
        assert answer.output_text
        assert answer.status in ("completed", "incomplete")
        assert 0 < answer.usage.output_tokens <= 20
        assert answer.usage.input_tokens > 2

    def response_stream_is_the_whole_answer(self) -> None:
        whole = self._respond("tell me", temperature=0)
        events = list(self._respond("tell me", temperature=0, stream=True))
        said = [one.delta for one in events if one.type == "response.output_text.delta"]
        assert "".join(said) == whole.output_text
        assert [one.sequence_number for one in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == whole.output_text
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens

    def response_stream_helper(self) -> None:
        with self._client.responses.stream(
            model=MODEL, input="with the helper", max_output_tokens=20
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.output_text.delta", "response.completed"} <= kinds
        assert final.output_text

    def response_with_a_tool_and_its_output(self) -> None:
        tool = {"type": "function", "strict": False} | WEATHER["function"]
        values = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
        first = self._respond("weather", **values)
        (call,) = first.output
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert "city" in json.loads(call.arguments)
        deltas = [
            event.delta
            for event in self._respond("weather", stream=True, **values)
            if event.type == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == call.arguments
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = self._respond([*say("weather"), call.to_dict(), output], tools=[tool])
        assert second.usage.input_tokens > first.usage.input_tokens

    def response_errors(self) -> None:
        error = raised(openai.BadRequestError, lambda: self._respond("wrong", max_output_tokens=0))
        assert error.body["message"]
        for state in ({"previous_response_id": "resp_1"}, {"background": True}):
            error = raised(openai.BadRequestError, lambda: self._respond("again", **state))  # noqa: B023 - called at once.
            assert "not" in error.body["message"]

    def embeddings(self) -> None:
        answer = self._client.embeddings.create(
            model=MODEL, input=["a", "b c"], encoding_format="float"
        )
        assert len(answer.data) == 2

    def long_prompt(self) -> None:
        answer = self._chat("word " * 20_000, max_tokens=2)
        assert answer.usage.prompt_tokens > 20_000

    def request_id(self) -> None:
        create = self._client.chat.completions.with_raw_response.create
        for wanted in ("my-own.id:7", None):
            headers = {"X-Request-Id": wanted} if wanted else {}
            raw = create(model=MODEL, messages=say("who"), max_tokens=2, extra_headers=headers)
            given = raw.headers["x-request-id"]
            assert given == wanted or (wanted is None and len(given) >= 16)
            assert raw.parse()._request_id == given

    def streamed_response(self) -> None:
        with self._client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=say("line by line"), max_tokens=5, stream=True
        ) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"

    def error_400(self) -> None:
        for values in ({"max_tokens": -1}, {"temperature": -2}, {"n": 0}, {"top_p": "much"}):
            error = raised(openai.BadRequestError, lambda: self._chat("wrong", **values))  # noqa: B023 - called at once.
            assert error.body["message"], values
            assert error.request_id, values

    def error_400_of_a_stream(self) -> None:
        error = raised(
            openai.BadRequestError, lambda: self._chat("wrong", max_tokens=-1, stream=True)
        )
        assert error.body["message"]

    def error_404_unknown_model(self) -> None:
        create = self._client.chat.completions.create
        error = raised(openai.NotFoundError, lambda: create(model="gpt-9", messages=say("who")))
        assert "gpt-9" in error.body["message"]

    def error_401(self) -> None:
        client = openai.OpenAI(base_url=self._strict_url, api_key=self._key, max_retries=0)
        for key in ("wrong", "none"):
            error = raised(openai.AuthenticationError, client.with_options(api_key=key).models.list)
            assert error.body["message"]
        assert client.chat.completions.create(model=MODEL, messages=say("hi"), max_tokens=2)

    async def error_429(self) -> None:
        """Ask for more than a proxy takes that has 8 slots and a queue of 1."""
        client = openai.AsyncOpenAI(base_url=self._strict_url, api_key=self._key, max_retries=0)

        async def ask(number: int) -> object:
            return await client.chat.completions.create(
                model=MODEL, messages=say(f"crowd {number}"), max_tokens=30
            )

        results = await asyncio.gather(*map(ask, range(40)), return_exceptions=True)
        refused = [one for one in results if isinstance(one, openai.RateLimitError)]
        assert refused
        assert all(one.response.headers["retry-after"] for one in refused)
        assert len(refused) + sum(not isinstance(one, Exception) for one in results) == 40
        # With the package's own retries all get through, as long as somebody is served.
        patient = client.with_options(max_retries=10)
        assert await patient.chat.completions.create(
            model=MODEL, messages=say("again"), max_tokens=2
        )
        await client.close()

    async def many_at_a_time(self) -> None:
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none", max_retries=0) as client:

            async def ask(number: int) -> tuple[str, str]:
                values = {"model": MODEL, "messages": say(f"number {number}"), "max_tokens": 15}
                values["temperature"] = 0  # Two samples need not be the same.
                whole = await client.chat.completions.create(**values)
                text = ""
                async for chunk in await client.chat.completions.create(**values, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return whole.choices[0].message.content, text

            results = await asyncio.gather(*map(ask, range(32)))
        assert all(whole == text for whole, text in results)
        assert len({whole for whole, _ in results}) == 32

    def closed_stream_frees_its_slot(self) -> None:
        self._wait_until_free()
        stream = self._chat(
            "for ever", max_tokens=_LONG, extra_body={"ignore_eos": True}, stream=True
        )
        for number, _ in enumerate(stream):
            if number == 5:
                break
        assert self._decoding() == 1
        stream.close()
        self._wait_until_free()

    async def cancelled_task_frees_its_slot(self) -> None:
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none") as client:
            task = asyncio.create_task(
                client.chat.completions.create(
                    model=MODEL,
                    messages=say("for ever"),
                    max_tokens=_LONG,
                    extra_body={"ignore_eos": True},
                )
            )
            end_s = time.monotonic() + _FREED_S
            while not self._decoding():
                assert time.monotonic() < end_s, "it was never decoded"
                await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._wait_until_free()

    def timeout_frees_its_slot(self) -> None:
        create = self._client.with_options(timeout=0.5).chat.completions.create
        values = {"max_tokens": _LONG, "extra_body": {"ignore_eos": True}}
        raised(
            openai.APITimeoutError, lambda: create(model=MODEL, messages=say("for ever"), **values)
        )
        self._wait_until_free()


if __name__ == "__main__":
    sys.exit(report(openai.__version__, Checks(*sys.argv[1:5])))
