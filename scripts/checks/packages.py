"""What client libraries get from the proxy: `python packages.py NAME BASE_URL ..`.

    openai BASE_URL ADMIN_URL STRICT_URL KEY           STRICT_URL asks for a key, and its queue is tiny
    anthropic|litellm|langchain BASE_URL MODEL [LEFT_OUT..]

Runs in the environment of one library, which has neither the others nor this project's package. Prints the
library's version, then a line of JSON for each check: what its name claims, and what is wrong, or null.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

FOUND_FAULTS = 3
# Of a forced tool's arguments: what a grammar makes of random weights has to end by itself.
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Result:
    """One check: which client, what, and what went wrong; None if nothing did."""

    client: str
    check: str
    fault: str | None


def report(version: str, found: Iterable[tuple[str, str | None]]) -> int:
    """Print the name of each check and what went wrong, or null; return `FOUND_FAULTS` if anything did."""
    print(version, flush=True)
    failures = 0
    for name, fault in found:
        failures += fault is not None
        print(json.dumps([name, fault]), flush=True)
    return FOUND_FAULTS if failures else 0


def outcomes(checks: object, *left_out: str) -> Iterator[tuple[str, str | None]]:
    """Run every public method of `checks`, in order; yield what its name claims, and what is wrong.

    Those whose names begin with one of `left_out` are left out.
    """
    for name in vars(type(checks)):
        if name.startswith(("_", *left_out)):
            continue
        fault = None
        try:
            ending = getattr(checks, name)()
            if ending is not None:
                asyncio.run(ending)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        yield name.replace("_", " "), fault


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the exception of that kind which a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("it was taken")


OPENAI_MODEL = "emulated"
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


class OpenAi:
    """The `openai` package, before emulated engines. The name of a method is what it claims.

    Args:
        base_url: The proxy's.
        admin_url: Its admin listener's.
        strict_url: The proxy with a key and a tiny queue.
        key: Its key.
    """

    def __init__(self, base_url: str, admin_url: str, strict_url: str, key: str) -> None:
        import openai  # type: ignore[import-not-found]

        self._package = openai
        self._url = f"{base_url}/v1"
        self._admin_url = admin_url
        self._strict_url = f"{strict_url}/v1"
        self._key = key
        self._client = self._package.OpenAI(base_url=self._url, api_key="none", max_retries=0)

    def _chat(self, text: str, **values: Any) -> Any:
        values.setdefault("max_tokens", 20)
        return self._client.chat.completions.create(
            model=OPENAI_MODEL, messages=say(text), **values
        )

    def _decoding(self) -> int:
        with urllib.request.urlopen(f"{self._admin_url}/admin/state") as page:  # noqa: S310 - http.
            return int(json.load(page)["state"]["decoding"])

    def _wait_until_free(self) -> None:
        end_s = time.monotonic() + _FREED_S
        while self._decoding():
            assert time.monotonic() < end_s, "a slot is still taken"
            time.sleep(0.02)

    def models_are_listed(self) -> None:
        assert [model.id for model in self._client.models.list()] == [OPENAI_MODEL]

    def chat(self) -> None:
        answer = self._chat("hello there")
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert 0 < answer.usage.completion_tokens <= 20
        assert answer.usage.prompt_tokens > 2

    def completion(self) -> None:
        answer = self._client.completions.create(
            model=OPENAI_MODEL, prompt="once upon", max_tokens=8
        )
        assert answer.choices[0].text
        assert answer.usage.completion_tokens <= 8

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

    def completion_stream(self) -> None:
        stream = self._client.completions.create(
            model=OPENAI_MODEL, prompt="once", max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream)

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
            model=OPENAI_MODEL, messages=say("with the helper"), max_tokens=20, stop=[words[8]]
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content.split() == words[:8]

    def _respond(self, text: Any, **values: Any) -> Any:
        values.setdefault("max_output_tokens", 20)
        return self._client.responses.create(model=OPENAI_MODEL, input=text, **values)

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
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert events[-1].response.output_text == whole.output_text
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens

    def response_stream_helper(self) -> None:
        with self._client.responses.stream(
            model=OPENAI_MODEL, input="with the helper", max_output_tokens=20
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.output_text.delta" in kinds
        assert kinds & {"response.completed", "response.incomplete"}
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
        error = raised(
            self._package.BadRequestError, lambda: self._respond("wrong", max_output_tokens=0)
        )
        assert error.body["message"]
        for state in ({"previous_response_id": "resp_1"}, {"background": True}):
            error = raised(self._package.BadRequestError, lambda: self._respond("again", **state))  # noqa: B023 - called at once.
            assert "not" in error.body["message"]

    def embeddings(self) -> None:
        answer = self._client.embeddings.create(
            model=OPENAI_MODEL, input=["a", "b c"], encoding_format="float"
        )
        assert len(answer.data) == 2

    def request_id(self) -> None:
        create = self._client.chat.completions.with_raw_response.create
        for wanted in ("my-own.id:7", None):
            headers = {"X-Request-Id": wanted} if wanted else {}
            raw = create(
                model=OPENAI_MODEL, messages=say("who"), max_tokens=2, extra_headers=headers
            )
            given = raw.headers["x-request-id"]
            assert given == wanted or (wanted is None and len(given) >= 16)
            assert raw.parse()._request_id == given

    def streamed_response(self) -> None:
        with self._client.chat.completions.with_streaming_response.create(
            model=OPENAI_MODEL, messages=say("line by line"), max_tokens=5, stream=True
        ) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"

    def error_400(self) -> None:
        for values in ({"max_tokens": -1}, {"temperature": -2}, {"n": 0}, {"top_p": "much"}):
            error = raised(self._package.BadRequestError, lambda: self._chat("wrong", **values))  # noqa: B023 - called at once.
            assert error.body["message"], values
            assert error.request_id, values

    def error_400_of_a_stream(self) -> None:
        error = raised(
            self._package.BadRequestError, lambda: self._chat("wrong", max_tokens=-1, stream=True)
        )
        assert error.body["message"]

    def error_404_unknown_model(self) -> None:
        create = self._client.chat.completions.create
        error = raised(
            self._package.NotFoundError, lambda: create(model="gpt-9", messages=say("who"))
        )
        assert "gpt-9" in error.body["message"]

    def error_401(self) -> None:
        client = self._package.OpenAI(base_url=self._strict_url, api_key=self._key, max_retries=0)
        for key in ("wrong", "none"):
            error = raised(
                self._package.AuthenticationError, client.with_options(api_key=key).models.list
            )
            assert error.body["message"]
        assert client.chat.completions.create(model=OPENAI_MODEL, messages=say("hi"), max_tokens=2)

    async def error_429(self) -> None:
        """Ask for more than a proxy takes that has 8 slots and a queue of 1."""
        client = self._package.AsyncOpenAI(
            base_url=self._strict_url, api_key=self._key, max_retries=0
        )

        async def ask(number: int) -> object:
            return await client.chat.completions.create(
                model=OPENAI_MODEL, messages=say(f"crowd {number}"), max_tokens=30
            )

        results = await asyncio.gather(*map(ask, range(40)), return_exceptions=True)
        refused = [one for one in results if isinstance(one, self._package.RateLimitError)]
        assert refused
        assert all(one.response.headers["retry-after"] for one in refused)
        assert len(refused) + sum(not isinstance(one, Exception) for one in results) == 40
        # With the package's own retries all get through, as long as somebody is served.
        patient = client.with_options(max_retries=10)
        assert await patient.chat.completions.create(
            model=OPENAI_MODEL, messages=say("again"), max_tokens=2
        )
        await client.close()

    async def many_at_a_time(self) -> None:
        async with self._package.AsyncOpenAI(
            base_url=self._url, api_key="none", max_retries=0
        ) as client:

            async def ask(number: int) -> tuple[str, str]:
                values = {
                    "model": OPENAI_MODEL,
                    "messages": say(f"number {number}"),
                    "max_tokens": 15,
                }
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
        async with self._package.AsyncOpenAI(base_url=self._url, api_key="none") as client:
            task = asyncio.create_task(
                client.chat.completions.create(
                    model=OPENAI_MODEL,
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
            self._package.APITimeoutError,
            lambda: create(model=OPENAI_MODEL, messages=say("for ever"), **values),
        )
        self._wait_until_free()


_USER = [{"role": "user", "content": "import os, sys"}]
_ANTHROPIC_TOOL = {"name": "get_weather", "input_schema": CITY_SCHEMA}


class Anthropic:
    """The `anthropic` package."""

    def __init__(self, base_url: str, model: str) -> None:
        import anthropic  # type: ignore[import-not-found]

        self._package = anthropic
        self._client = self._package.Anthropic(base_url=base_url, api_key="none", max_retries=0)
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
        values = self._values(tools=[_ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=200)
        answer = self._client.messages.create(**values)
        (block,) = [one for one in answer.content if one.type == "tool_use"]
        assert block.name == "get_weather"
        assert isinstance(block.input["city"], str)

    def tool_that_is_forced_streamed(self) -> None:
        values = self._values(tools=[_ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=200)
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
        none = {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "none"}}
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
                self._package.BadRequestError,
                lambda: create(**self._values(**changes)),  # noqa: B023 - called at once.
            )
            assert error.body["error"]["message"], changes  # vLLM's schema errors are OpenAI's.

    def error_404(self) -> None:
        create = self._client.messages.create
        error = raised(
            self._package.NotFoundError, lambda: create(**self._values(model="claude-unknown"))
        )
        assert error.body["type"] == "error", error.body

    async def many_at_a_time(self) -> None:
        """Ask for 16 streams together."""
        async with self._package.AsyncAnthropic(base_url=self._url, api_key="none") as client:

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


_LITELLM_USER = [{"role": "user", "content": "class Reader(io.IOBase):"}]
_OPENAI_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CITY_SCHEMA},
}


class LiteLlm:
    """The `litellm` package, by either of its APIs."""

    def __init__(self, base_url: str, model: str) -> None:
        # Else it asks the network for prices when it is imported.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm  # type: ignore[import-not-found]

        self._package = litellm
        litellm.suppress_debug_info = True
        litellm.telemetry = False
        self._url = base_url
        self._model = model

    def _values(self, **changes: Any) -> dict[str, Any]:
        return {
            "model": f"hosted_vllm/{self._model}",
            "api_base": f"{self._url}/v1",
            "api_key": "none",
            "messages": _LITELLM_USER,
            "max_tokens": 16,
            "temperature": 0.0,
            "num_retries": 0,
        } | changes

    def completion(self) -> None:
        answer = self._package.completion(**self._values())
        assert answer.choices[0].message.content
        assert 0 < answer.usage.completion_tokens <= 16

    def stream_is_the_whole_answer_with_usage(self) -> None:
        whole = self._package.completion(**self._values())
        options = {"stream_options": {"include_usage": True}}
        chunks = list(self._package.completion(**self._values(stream=True, **options)))
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text == whole.choices[0].message.content
        used = [one.usage for one in chunks if getattr(one, "usage", None)]
        assert used[-1].completion_tokens == whole.usage.completion_tokens

    def text_completion(self) -> None:
        values = self._values(prompt="for line in file:")
        del values["messages"]
        values["model"] = f"text-completion-openai/{self._model}"
        assert self._package.text_completion(**values).choices[0].text

    def tool_that_is_required(self) -> None:
        values = self._values(tools=[_OPENAI_TOOL], tool_choice="required", max_tokens=200)
        (call,) = self._package.completion(**values).choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)

    def anthropic_messages(self) -> None:
        values = self._values(model=f"anthropic/{self._model}", api_base=self._url)
        assert self._package.completion(**values).choices[0].message.content

    def anthropic_messages_streamed(self) -> None:
        values = self._values(model=f"anthropic/{self._model}", api_base=self._url, stream=True)
        whole = self._package.completion(**self._values()).choices[0].message.content
        chunks = self._package.completion(**values)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole

    def responses(self) -> None:
        values: dict[str, Any] = {
            "model": f"openai/{self._model}",
            "api_base": f"{self._url}/v1",
            "api_key": "none",
        }
        values |= {"input": "import os, sys", "max_output_tokens": 16, "temperature": 0.0}
        whole = self._package.responses(**values)
        text = whole.output[0].content[0].text
        assert text
        said = [
            event.delta
            for event in self._package.responses(**values, stream=True)
            if event.type == "response.output_text.delta"
        ]
        assert "".join(said) == text

    def errors(self) -> None:
        raised(
            self._package.BadRequestError,
            lambda: self._package.completion(**self._values(max_tokens=0)),
        )
        unknown = self._values(model="hosted_vllm/gpt-9")
        raised(self._package.NotFoundError, lambda: self._package.completion(**unknown))

    async def many_at_a_time(self) -> None:
        """Ask for 16 answers together."""
        answers = await asyncio.gather(
            *(self._package.acompletion(**self._values()) for _ in range(16))
        )
        assert len({answer.choices[0].message.content for answer in answers}) == 1


_SCHEMA = {"title": "Answer", "description": "What the weather is like."} | CITY_SCHEMA


class LangChain:
    """The `langchain-openai` and `langchain-anthropic` packages."""

    def __init__(self, base_url: str, model: str) -> None:
        import langchain_anthropic  # type: ignore[import-not-found]
        import langchain_openai  # type: ignore[import-not-found]
        import openai

        self._anthropic, self._openai, self._errors = langchain_anthropic, langchain_openai, openai
        self._values: dict[str, Any] = {
            "base_url": f"{base_url}/v1",
            "api_key": "none",
            "model": model,
            "max_tokens": 16,
            "temperature": 0.0,
            "max_retries": 0,
        }

    def _chat(self, **changes: Any) -> Any:
        return self._openai.ChatOpenAI(**(self._values | changes))

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
        assert self._openai.OpenAI(**self._values).invoke("for line in file:")

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
        chat = self._anthropic.ChatAnthropic(**values, base_url=url, max_retries=0)
        assert chat.invoke("import os, sys").text
        assert "".join(chunk.text for chunk in chat.stream("import os, sys"))

    def errors(self) -> None:
        raised(self._errors.BadRequestError, lambda: self._chat(temperature=-1.0).invoke("a"))
        raised(self._errors.NotFoundError, lambda: self._chat(model="gpt-9").invoke("a"))


# By the name of each library: its checks, and the distribution whose version is told.
LIBRARIES: dict[str, tuple[Callable[..., object], str]] = {
    "openai": (OpenAi, "openai"),
    "anthropic": (Anthropic, "anthropic"),
    "litellm": (LiteLlm, "litellm"),
    "langchain": (LangChain, "langchain-openai"),
}

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    checks, distribution = LIBRARIES[name]
    given = len(words) if name == "openai" else 2
    version = importlib.metadata.version(distribution)
    sys.exit(report(version, outcomes(checks(*words[:given]), *words[given:])))
