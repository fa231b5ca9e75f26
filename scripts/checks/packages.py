"""What client libraries get from the proxy: `python packages.py NAME BASE_URL MODEL ..`.

    openai BASE_URL MODEL ADMIN_URL STRICT_URL KEY     STRICT_URL asks for a key, and its queue is tiny
    anthropic|litellm|langchain BASE_URL MODEL [LEFT_OUT..]

Runs in the environment of one library, which has no other one and not this project's package. Prints the
library's version, then a line of JSON for each check: what its name claims, and what is wrong, or null.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

FOUND_FAULTS = 3
# Of a forced tool's arguments: what a grammar makes of random weights has to end by itself.
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "get_weather", "parameters": CITY_SCHEMA}
TOOL = {"type": "function", "function": _FUNCTION}
_TEXT = "import os, sys"
_BETA = "interleaved-thinking-2025-05-14"
_FREED_S = 2.0
_FOR_EVER: dict[str, Any] = {"max_tokens": 100_000, "extra_body": {"ignore_eos": True}}


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
    for name in [name for kind in reversed(type(checks).__mro__) for name in vars(kind)]:
        if name.startswith(("_", *left_out)) or not callable(getattr(checks, name)):
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


def say(text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Said:
    """An answer, as far as it is compared."""

    text: str
    tokens: int = 0  # 0 if the library does not count them.
    calls: tuple[tuple[str, str], ...] = ()  # Names and arguments.


def of_choices(answer: Any, *, stream: bool) -> Said:
    """Read the answer of a chat or a completion, whole or in chunks."""
    text, tokens, calls = "", 0, dict[int, tuple[str, str]]()
    for chunk in answer if stream else [answer]:
        usage = getattr(chunk, "usage", None)
        tokens = usage.completion_tokens if usage else tokens
        for choice in chunk.choices:
            part = getattr(choice, "delta" if stream else "message", None) or choice
            text += getattr(part, "content", None) or getattr(part, "text", None) or ""
            for place, call in enumerate(getattr(part, "tool_calls", None) or ()):
                name, arguments = calls.get(place, ("", ""))
                more = call.function
                calls[place] = name + (more.name or ""), arguments + (more.arguments or "")
    return Said(text, tokens, tuple(calls.values()))


def of_response(answer: Any, *, stream: bool) -> Said:
    """Read a response; the pieces of a stream must be what its last event says as a whole."""
    deltas = ""
    if stream:
        events = list(answer)
        kinds = ("response.output_text.delta", "response.function_call_arguments.delta")
        deltas = "".join(one.delta for one in events if one.type in kinds)
        assert events[-1].type in ("response.completed", "response.incomplete")
        answer = events[-1].response
    parts = [part for one in answer.output if one.type == "message" for part in one.content]
    text = "".join(part.text for part in parts)
    calls = tuple((o.name, o.arguments) for o in answer.output if o.type == "function_call")
    assert not stream or deltas == text + "".join(arguments for _, arguments in calls)
    return Said(text, answer.usage.output_tokens, calls)


class Library:
    """What must hold of every library. The name of a method is what it claims."""

    # Those that ask, by name: each is given a text, whether to stream, and members of the request.
    _ways: Mapping[str, Callable[..., Said]]
    _calling: Sequence[str] = ()  # Those that call a `tool` that the request offers.
    # What is raised for a wrong request, and for an unknown model.
    _refusals: tuple[type[Exception], type[Exception]]

    def stream_is_the_whole_answer_with_usage(self) -> None:
        for name, ask in self._ways.items():
            whole, streamed = (ask(_TEXT, stream=stream) for stream in (False, True))
            assert whole.text, name
            assert whole.tokens <= 16
            assert whole == streamed, f"{name}: {whole} and {streamed}"

    def tool_that_is_required_is_called(self) -> None:
        for name in self._calling:
            for stream in (False, True):
                ((called, arguments),) = self._ways[name](_TEXT, stream=stream, tool=True).calls
                assert called == "get_weather", name
                assert isinstance(json.loads(arguments)["city"], str), f"{name}: {arguments}"

    def many_at_a_time_get_their_own(self) -> None:
        for name, ask in self._ways.items():
            with ThreadPoolExecutor(32) as threads:
                said = list(
                    threads.map(lambda i: ask(f"n {i // 2}", stream=bool(i % 2)), range(32))  # noqa: B023 - ends within.
                )
            assert said[::2] == said[1::2], name
            assert len({one.text for one in said}) == 16, name

    def wrong_requests_and_unknown_models_raise(self) -> None:
        for ask in self._ways.values():
            for stream in (False, True):
                raised(self._refusals[0], lambda: ask(_TEXT, stream=stream, temperature=-1.0))  # noqa: B023 - called at once.
            raised(self._refusals[1], lambda: ask(_TEXT, stream=False, model="gpt-9"))  # noqa: B023 - called at once.


class OpenAi(Library):
    """The `openai` package, before emulated engines.

    Args:
        base_url: The proxy's.
        model: What engines call it.
        admin_url: The proxy's admin listener's.
        strict_url: The proxy with a key and a tiny queue.
        key: Its key.
    """

    def __init__(self, base_url: str, model: str, *rest: str) -> None:
        import openai  # type: ignore[import-not-found]

        self._admin_url, strict_url, key = rest
        self._package, self._model = openai, model
        self._refusals = openai.BadRequestError, openai.NotFoundError
        self._ways = {"chat": self._chat, "completion": self._complete, "response": self._respond}
        self._calling = ("chat", "response")
        values = {"base_url": f"{base_url}/v1", "api_key": "none", "max_retries": 0}
        self._client = openai.OpenAI(**values)
        self._patient = openai.AsyncOpenAI(**values)
        self._strict = openai.OpenAI(base_url=f"{strict_url}/v1", api_key=key, max_retries=0)
        self._many = openai.AsyncOpenAI(base_url=f"{strict_url}/v1", api_key=key, max_retries=0)

    def _values(self, limit: str = "max_tokens", **values: Any) -> dict[str, Any]:
        return {"model": self._model, limit: 16, "temperature": 0} | values

    def _chat(self, text: str, *, stream: bool, tool: bool = False, **values: Any) -> Said:
        values |= {"stream_options": {"include_usage": True}} if stream else {}
        required = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        values = self._values(messages=say(text), stream=stream, **values)
        values |= required if tool else {}
        return of_choices(self._client.chat.completions.create(**values), stream=stream)

    def _complete(self, text: str, *, stream: bool, **values: Any) -> Said:
        values |= {"stream_options": {"include_usage": True}} if stream else {}
        values = self._values(prompt=text, stream=stream, **values)
        return of_choices(self._client.completions.create(**values), stream=stream)

    def _respond(self, text: str, *, stream: bool, tool: bool = False, **values: Any) -> Said:
        given = {"tools": [{"type": "function", "strict": False} | _FUNCTION]}
        required = given | {"tool_choice": "required", "max_output_tokens": 200}
        values = self._values("max_output_tokens", input=text, stream=stream, **values)
        values |= required if tool else {}
        return of_response(self._client.responses.create(**values), stream=stream)

    def _decoding(self) -> int:
        with urllib.request.urlopen(f"{self._admin_url}/admin/state") as page:  # noqa: S310 - http.
            return int(json.load(page)["state"]["decoding"])

    def _wait(self, decoding: int) -> None:
        end_s = time.monotonic() + _FREED_S
        while self._decoding() != decoding:
            assert time.monotonic() < end_s, f"{self._decoding()} slots are taken, not {decoding}"
            time.sleep(0.02)

    def models_are_listed(self) -> None:
        assert [model.id for model in self._client.models.list()] == [self._model]

    def stream_helpers_build_the_answer(self) -> None:
        # The one of chats takes an answer that ends with its limit for an error.
        words = self._chat("with the helper", stream=False).text.split()
        values = {"model": self._model, "messages": say("with the helper"), "temperature": 0}
        with self._client.chat.completions.stream(**values, stop=[words[8]]) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content.split() == words[:8]
        values = self._values("max_output_tokens", input=_TEXT)
        with self._client.responses.stream(**values) as stream:
            events = list(stream)
        assert [one.sequence_number for one in events] == list(range(len(events)))
        assert stream.get_final_response().output_text

    def response_with_a_tool_and_its_output(self) -> None:
        tool = {"type": "function", "strict": False} | _FUNCTION
        values = {"model": self._model, "tools": [tool], "max_output_tokens": 200}
        create = self._client.responses.create
        first = create(input=say("weather"), tool_choice="required", **values)
        (call,) = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = create(input=[*say("weather"), call.to_dict(), output], **values)
        assert second.usage.input_tokens > first.usage.input_tokens
        for state in ({"previous_response_id": "resp_1"}, {"background": True}):
            error = raised(self._refusals[0], lambda: create(input="again", **values, **state))  # noqa: B023 - called at once.
            assert "not" in error.body["message"]

    def embeddings(self) -> None:
        values = {"model": self._model, "input": ["a", "b c"], "encoding_format": "float"}
        assert len(self._client.embeddings.create(**values).data) == 2

    def request_id(self) -> None:
        create = self._client.chat.completions.with_raw_response.create
        for wanted in ("my-own.id:7", None):
            headers = {"X-Request-Id": wanted} if wanted else {}
            raw = create(**self._values(messages=say("who")), extra_headers=headers)
            given = raw.headers["x-request-id"]
            assert given == wanted or (wanted is None and len(given) >= 16)
            assert raw.parse()._request_id == given

    def error_400_tells_what_and_which(self) -> None:
        for values in ({"max_tokens": -1}, {"n": 0}, {"top_p": "much"}):
            error = raised(self._refusals[0], lambda: self._chat("a", stream=False, **values))  # noqa: B023 - called at once.
            assert error.body["message"], values
            assert error.request_id, values
        unknown = lambda: self._chat("who", stream=False, model="gpt-9")  # noqa: E731 - a call.
        assert "gpt-9" in raised(self._refusals[1], unknown).body["message"]

    def error_401(self) -> None:
        wrong = self._strict.with_options(api_key="wrong")
        assert raised(self._package.AuthenticationError, wrong.models.list).body["message"]
        assert self._strict.models.list()

    async def error_429(self) -> None:
        """Ask for more than a proxy takes that has 8 slots and a queue of 1."""
        create = self._many.chat.completions.create

        def ask(number: int) -> Any:
            return create(**self._values(messages=say(f"crowd {number}"), max_tokens=30))

        results = await asyncio.gather(*map(ask, range(40)), return_exceptions=True)
        refused = [one for one in results if isinstance(one, self._package.RateLimitError)]
        assert refused
        assert all(one.response.headers["retry-after"] for one in refused)
        assert len(refused) + sum(not isinstance(one, Exception) for one in results) == 40
        # With the package's own retries all get through, as long as the proxy serves some.
        again = self._many.with_options(max_retries=10).chat.completions.create
        assert await again(**self._values(messages=say("again")))

    async def clients_that_leave_free_their_slots(self) -> None:
        values = {"model": self._model, "messages": say("for ever"), **_FOR_EVER}
        self._wait(0)
        stream = self._client.chat.completions.create(**values, stream=True)
        for _ in range(5):
            next(stream)
        self._wait(1)
        stream.close()
        self._wait(0)
        task = asyncio.create_task(self._patient.chat.completions.create(**values))
        await asyncio.to_thread(self._wait, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(self._wait, 0)
        create = self._client.with_options(timeout=0.5).chat.completions.create
        raised(self._package.APITimeoutError, lambda: create(**values))
        self._wait(0)


class Anthropic(Library):
    """The `anthropic` package."""

    def __init__(self, base_url: str, model: str) -> None:
        import anthropic  # type: ignore[import-not-found]

        self._client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
        self._refusals, self._model = (anthropic.BadRequestError, anthropic.NotFoundError), model
        self._calling = ("messages",)
        beta = partial(self._ask, self._client.beta.messages, betas=[_BETA])
        self._ways = {"messages": partial(self._ask, self._client.messages), "beta": beta}

    def _values(self, temperature: float = 0.0, **values: Any) -> dict[str, Any]:
        # The package has no argument for a temperature any more.
        more = {"extra_body": {"temperature": temperature}}
        return {"model": self._model, "max_tokens": 16, "messages": say(_TEXT)} | more | values

    def _ask(self, api: Any, text: str, *, stream: bool, tool: bool = False, **values: Any) -> Said:
        values = self._values(messages=say(text), **values)
        if tool:
            values |= {"tools": [{"name": "get_weather", "input_schema": CITY_SCHEMA}]}
            values |= {"tool_choice": {"type": "any"}, "max_tokens": 200}
        if stream:
            with api.stream(**values) as events:
                deltas = "".join(events.text_stream)
                answer = events.get_final_message()
        else:
            answer, deltas = api.create(**values), None
        said = "".join(one.text for one in answer.content if one.type == "text")
        assert deltas in (None, said)
        assert answer.stop_reason in ("max_tokens", "end_turn", "tool_use")
        used = [one for one in answer.content if one.type == "tool_use"]
        calls = tuple((one.name, json.dumps(one.input)) for one in used)
        return Said(said, answer.usage.output_tokens, calls)

    def _prompt_tokens(self, **values: Any) -> int:
        """Return the tokens of a prompt; those of a cache are counted apart."""
        usage = self._client.messages.create(**self._values(**values)).usage
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        return int(usage.input_tokens + cached)

    def raw_events(self) -> None:
        kinds = [one.type for one in self._client.messages.create(**self._values(stream=True))]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    def system_turns_and_results_are_read(self) -> None:
        call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather"}
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "0"}
        used = [thought, call | {"input": {"city": "Oslo"}}]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
        turns = [*say(_TEXT), {"role": "assistant", "content": used}]
        turns.append({"role": "user", "content": [result]})
        tool = {"name": "get_weather", "input_schema": CITY_SCHEMA}
        none: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "none"}}
        counts = [{}, {"system": "Be brief."}, none, none | {"messages": turns}]
        tokens = [self._prompt_tokens(**values) for values in counts]
        assert tokens[0] < tokens[1], tokens
        assert tokens[2] < tokens[3], tokens

    def counted_tokens_are_those_of_the_prompt(self) -> None:
        counted = self._client.messages.count_tokens(model=self._model, messages=say(_TEXT))
        assert counted.input_tokens == self._prompt_tokens()

    def errors_say_what_is_wrong(self) -> None:
        for changes in ({"max_tokens": 0}, {"messages": "hello"}):
            create = self._client.messages.create
            error = raised(self._refusals[0], lambda: create(**self._values(**changes)))  # noqa: B023 - called at once.
            assert error.body["error"]["message"], changes  # vLLM's schema errors are OpenAI's.
        error = raised(self._refusals[1], lambda: create(**self._values(model="claude-unknown")))
        assert error.body["type"] == "error", error.body


class LiteLlm(Library):
    """The `litellm` package, by each of its APIs."""

    _calling = ("hosted_vllm",)

    def __init__(self, base_url: str, model: str) -> None:
        # Else it asks the network for prices when it is imported.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm  # type: ignore[import-not-found]

        litellm.suppress_debug_info, litellm.telemetry = True, False
        self._refusals = litellm.BadRequestError, litellm.NotFoundError
        self._package, self._model, self._url = litellm, model, base_url
        self._ways = {
            "hosted_vllm": partial(self._ask, "hosted_vllm", "/v1"),
            "anthropic": partial(self._ask, "anthropic", ""),
            "text-completion-openai": self._complete,
            "openai": self._respond,
        }

    def _values(self, api: str, path: str, *, stream: bool, **values: Any) -> dict[str, Any]:
        values["model"] = f"{api}/{values.get('model', self._model)}"
        where = {"api_base": f"{self._url}{path}", "api_key": "none", "num_retries": 0}
        return where | {"max_tokens": 16, "temperature": 0.0, "stream": stream} | values

    def _ask(self, api: str, path: str, text: str, *, tool: bool = False, **values: Any) -> Said:
        values = self._values(api, path, messages=say(text), **values)
        values |= {"stream_options": {"include_usage": True}} if values["stream"] else {}
        if tool:
            values |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        return of_choices(self._package.completion(**values), stream=values["stream"])

    def _complete(self, text: str, **values: Any) -> Said:
        values = self._values("text-completion-openai", "/v1", prompt=text, **values)
        said = of_choices(self._package.text_completion(**values), stream=values["stream"])
        return Said(said.text)

    def _respond(self, text: str, **values: Any) -> Said:
        values = self._values("openai", "/v1", input=text, **values)
        values["max_output_tokens"] = values.pop("max_tokens")
        return of_response(self._package.responses(**values), stream=values["stream"])


class LangChain(Library):
    """The `langchain-openai` and `langchain-anthropic` packages."""

    _calling = ("chat",)

    def __init__(self, base_url: str, model: str) -> None:
        import langchain_anthropic  # type: ignore[import-not-found]
        import langchain_openai  # type: ignore[import-not-found]
        import openai

        self._model, self._package = model, langchain_openai
        self._refusals = openai.BadRequestError, openai.NotFoundError
        self._values = {"api_key": "none", "max_tokens": 16, "max_retries": 0, "temperature": 0.0}
        self._urls = {"/v1": f"{base_url}/v1", "": base_url}
        openai_chat, anthropic_chat = langchain_openai.ChatOpenAI, langchain_anthropic.ChatAnthropic
        self._ways = {
            "chat": partial(self._ask, openai_chat, "/v1", stream_usage=True),
            "responses": partial(self._ask, openai_chat, "/v1", use_responses_api=True),
            "completion": self._complete,
        }
        self._messages = partial(self._ask, anthropic_chat, "", _TEXT)

    def _made(self, kind: Any, path: str, **values: Any) -> Any:
        return kind(**{"model": self._model, "base_url": self._urls[path]} | self._values | values)

    def _ask(
        self, kind: Any, path: str, text: str, *, stream: bool, tool: bool = False, **more: Any
    ) -> Said:
        chat = self._made(kind, path, **more | ({"max_tokens": 200} if tool else {}))
        chat = chat.bind_tools([TOOL], tool_choice="required") if tool else chat
        answer = chat.invoke(text)
        if stream:
            first, *rest = chat.stream(text)
            answer = sum(rest, start=first)
        calls = tuple((one["name"], json.dumps(one["args"])) for one in answer.tool_calls)
        return Said(answer.text, answer.usage_metadata["output_tokens"], calls)

    def _complete(self, text: str, *, stream: bool, **values: Any) -> Said:
        model = self._made(self._package.OpenAI, "/v1", **values)
        return Said("".join(model.stream(text)) if stream else model.invoke(text))

    def messages(self) -> None:
        assert self._messages(stream=True) == self._messages(stream=False)

    def batch(self) -> None:
        chat = self._made(self._package.ChatOpenAI, "/v1")
        assert all(one.content for one in chat.batch([f"def f{i}(): pass" for i in range(8)]))

    async def stream_without_waiting(self) -> None:
        """Stream by the asynchronous interface."""
        chat = self._made(self._package.ChatOpenAI, "/v1")
        assert "".join([chunk.content async for chunk in chat.astream(_TEXT)])

    def structured_output_by_a_tool(self) -> None:
        schema = {"title": "Answer", "description": "What the weather is like."} | CITY_SCHEMA
        chat = self._made(self._package.ChatOpenAI, "/v1", max_tokens=200)
        asked = chat.with_structured_output(schema, method="function_calling")
        assert isinstance(asked.invoke("What is the weather in Oslo?")["city"], str)


# By the name of each library: its checks, and the distribution whose version is shown.
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
