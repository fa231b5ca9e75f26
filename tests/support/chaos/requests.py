"""Client requests drawn from a generator: of every shape that an OpenAI client may send.

Each prompt holds a word of its own, which identifies its answer: the prompt decides the emulated model's
text.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from balanceroute.proxy.core.errors import ConfigError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENS = "/inference/v1/generate"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
AGENTS = frozenset({MESSAGES, RESPONSES})
"""The routes that agents speak."""
_WORDS = (
    "water",
    "Straße",
    "naïve",
    "数据",
    'say "so"',
    "back\\slash",
    "🙂",
    "\u2028",
    "<b>",
    "x" * 40,
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "düse", "parameters": {"properties": {"on": {"type": "boolean"}}}},
    },
]
# Of completions of token ids, those that are asked for at `TOKENS`.
_TOKENS = 0.5
# Of chats, those that are asked for as messages, and as responses.
_AGENTS = 0.25
# What both agents' APIs call as a chat does.
_COMMON = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "kv_transfer_params",
    "vllm_xargs",
    "priority",
)
_OF_RESPONSES = (
    *("ignore_eos", "seed", "include_stop_str_in_output", "stop_token_ids", "user", "stop"),
)
_SCHEMAS = 0.1
_SCHEMA: dict[str, Any] = {
    "name": "answer",
    "schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
    },
}
_LONGEST = 1_000
_TURNS = 0.5
_ASIDE = 0.2
_BESIDE = frozenset({"model", "prompt", "stream", "stream_options", "return_token_ids"})
_SAMPLED = frozenset(
    {
        *("ignore_eos", "include_stop_str_in_output", "logprobs", "max_tokens", "min_tokens", "n"),
        *("seed", "stop", "stop_token_ids", "temperature", "top_p"),
    }
)
_FORBIDDEN: list[dict[str, Any]] = [
    {"n": 0},
    {"n": 1_000},
    {"vllm_xargs": {"kv_transfer_params": "{}"}},
]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request as a client sends it."""

    number: int  # Counts the requests of a run.
    path: str
    values: dict[str, Any]  # The members of the body.
    body: bytes
    request_id: str  # `X-Request-Id`.
    forbidden: bool = False  # Whether the proxy refuses it in its own words.
    key: str = ""  # The API key that it presents; empty for none.
    deadline_ms: int | None = None  # `X-Request-Deadline-Ms`; None for none.
    session: str | None = None  # `X-Session-Id`; empty for none, None for that of its request id.

    @property
    def stream(self) -> bool:
        """Whether the answer is to be a stream."""
        return self.values.get("stream") is True


@dataclass(frozen=True, slots=True)
class RequestMix:
    """What requests are like.

    Raises:
        ConfigError: A share is not from 0 to 1.
    """

    model: str  # The model that they name.
    mean_prompt_words: float = 60.0  # Mean length of ordinary prompts.
    max_tokens: int = 40  # The largest limit that they name.
    big: float = 0.003  # Share of prompts of `big_bytes`.
    big_bytes: tuple[int, int] = (100_000, 1_000_000)  # From and to.
    odd: float = 0.05  # Share of requests with corner values, some of which engines refuse.

    def __post_init__(self) -> None:
        for name in ("big", "odd"):
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name} is {share}, must be from 0 to 1")


def draw_request(rng: random.Random, number: int, mix: RequestMix) -> ClientRequest:
    """Return a request; the same state of `rng` gives the same one."""
    chat = rng.random() < 0.55
    values: dict[str, Any] = {"model": mix.model}
    if rng.random() < 0.05:
        del values["model"]
    words = _words(rng, number, mix)
    if chat:
        _draw_chat(rng, values, words)
        # Likewise, see below.
        own = random.Random(f"schema {' '.join(words)}")
        if own.random() < _SCHEMAS and "response_format" not in values:
            values["response_format"] = {"type": "json_schema", "json_schema": _SCHEMA}
    else:
        _draw_completion(rng, values, words)
    _draw_limits(rng, values, mix, chat=chat)
    _draw_sampling(rng, values)
    _draw_stream(rng, values)
    forbidden = rng.random() < mix.odd and _draw_oddity(rng, values, chat=chat)
    path = CHAT if chat else COMPLETIONS
    body = _spell(rng, values)
    # With a generator of its own: the other requests do not depend on it.
    tokens, own = None if forbidden else of_tokens(values), random.Random(body)
    if tokens is not None and own.random() < _TOKENS:
        path, values, body = TOKENS, tokens, _spell(own, tokens)
    elif chat and not forbidden:
        path, values = as_agents(own, values)
        body = body if path == CHAT else _spell(own, values)
    return ClientRequest(number, path, values, body, f"req-{number}", forbidden)


def of_tokens(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the members of a completion of token ids as `TOKENS` takes them; None if it cannot."""
    prompt, sampling = values.get("prompt"), values.keys() - _BESIDE
    if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
        return None
    if not sampling <= _SAMPLED or "model" not in values:
        return None
    limit = values.get("max_tokens", 0)
    if limit is None or limit > _LONGEST:
        return None  # It goes on to the end of the context, where other routes refuse it.
    return {
        **{name: values[name] for name in sorted(_BESIDE - {"prompt"}) if name in values},
        "token_ids": prompt,
        # Without a limit it would go on to the end of the context.
        "sampling_params": {"max_tokens": 16, **{name: values[name] for name in sorted(sampling)}},
    }


def as_agents(rng: random.Random, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a chat as an agent asks for it, or at times as it is: the path and the members."""
    kind = rng.random()
    if kind < _AGENTS and _limit(values) is not None and "model" in values:
        return MESSAGES, of_messages(rng, values)
    if _AGENTS <= kind < 2 * _AGENTS:
        return RESPONSES, of_responses(rng, values)
    return CHAT, values


def of_messages(rng: random.Random, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a chat as `MESSAGES` takes them, without those that it has not."""
    asked = {name: values[name] for name in _COMMON if name in values}
    asked["max_tokens"] = _limit(values)
    messages = list(values["messages"])
    if messages and messages[0]["role"] == "system":
        block = {"type": "text", "text": messages.pop(0)["content"]}
        asked["system"] = [block | {"cache_control": {"type": "ephemeral"}}]
    asked["messages"] = messages
    if values.get("tools"):
        functions = [tool["function"] for tool in values["tools"]]
        asked["tools"] = [
            {"name": one["name"], "input_schema": one["parameters"]} for one in functions
        ]
        choice = values.get("tool_choice")
        if isinstance(choice, dict):
            asked["tool_choice"] = {"type": "tool", "name": choice["function"]["name"]}
        elif choice is not None:
            asked["tool_choice"] = {"type": "any" if choice == "required" else choice}
        if rng.random() < _TURNS:
            thought = {"type": "thinking", "thinking": "Hm.", "signature": "0"}
            call = {
                "type": "tool_use",
                "id": "toolu_1",
                "name": "get_weather",
                "input": {"days": 1},
            }
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."}
            messages += [
                {"role": "assistant", "content": [thought, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "And then?"}]},
            ]
    if "stop" in values:
        stop = values["stop"]
        asked["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if rng.random() < _ASIDE:
        asked |= {"metadata": {"user_id": "somebody"}, "thinking": {"type": "adaptive"}}
        asked["context_management"] = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    return asked


def of_responses(rng: random.Random, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a chat as `RESPONSES` takes them, without those that it has not."""
    asked = {name: values[name] for name in (*_COMMON, *_OF_RESPONSES) if name in values}
    limit = _limit(values)
    if limit is not None:
        asked["max_output_tokens"] = limit
    messages = list(values["messages"])
    if messages and messages[0]["role"] == "system":
        asked["instructions"] = messages.pop(0)["content"]
    items = [_item(one) for one in messages]
    if items and values.get("continue_final_message"):
        items[-1] |= {"status": "incomplete"}
    if values.get("tools"):
        tools = [{"type": "function"} | tool["function"] for tool in values["tools"]]
        asked["tools"] = [*tools, {"type": "custom", "name": "edit"}, {"type": "web_search"}]
        choice = values.get("tool_choice")
        if isinstance(choice, dict):
            choice = {"type": "function", "name": choice["function"]["name"]}
        if choice is not None:
            asked["tool_choice"] = choice
        if rng.random() < _TURNS:
            call = {"name": "get_weather", "arguments": '{"days": 1}', "call_id": "call_1"}
            items += [
                {"type": "reasoning", "summary": [], "content": None},
                {"type": "function_call"} | call,
                {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
            ]
    text = messages[0]["content"] if len(items) == 1 else None
    asked["input"] = text if isinstance(text, str) and rng.random() < _TURNS else items
    if values.get("logprobs"):
        asked["include"] = ["message.output_text.logprobs"]
        asked["top_logprobs"] = values.get("top_logprobs", 0)
    elif rng.random() < _ASIDE:
        asked |= {"include": ["reasoning.encrypted_content"], "store": False}
        asked |= {"prompt_cache_key": "somebody", "parallel_tool_calls": False}
    return asked


def _item(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a chat as an item of a response's input."""
    kind = "output_text" if message["role"] == "assistant" else "input_text"
    content = message["content"]
    if isinstance(content, str):
        content = [{"text": content}]
    parts = [{"type": kind, "text": part["text"]} for part in content]
    return {"type": "message", "role": message["role"], "content": parts}


def _limit(values: Mapping[str, Any]) -> int | None:
    limit: int | None = values.get("max_tokens", values.get("max_completion_tokens"))
    return limit


def may_end_with_the_prefill(request: ClientRequest) -> bool:
    """Return whether the first token may end an answer on a prefiller that goes on elsewhere.

    Agents' APIs have no least length, and without a seed no two engines draw alike.
    """
    values = request.values
    return request.path in AGENTS and values.get("temperature") != 0 and "seed" not in values


def with_seed(values: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the members of a request with a seed."""
    sampling = values.get("sampling_params")
    if sampling is None:
        return {**values, "seed": seed}
    return {**values, "sampling_params": {**sampling, "seed": seed}}


def with_beginning(request: ClientRequest, text: str, *, session: str) -> ClientRequest:
    """Return a request whose prompt begins with a text, if it is one text, and that names its session."""
    values = dict(request.values)
    messages = values.get("messages")
    name = next((name for name in ("prompt", "input") if name in values), "")
    prompt = values.get(name)
    if prompt and isinstance(prompt, str):
        values[name] = f"{text} {prompt}"
    elif messages and isinstance(messages[0]["content"], str):
        first = messages[0] | {"content": f"{text} {messages[0]['content']}"}
        values["messages"] = [first, *messages[1:]]
    body = _spell(random.Random(request.body), values)
    return replace(request, values=values, body=body, session=session)


def _words(rng: random.Random, number: int, mix: RequestMix) -> list[str]:
    """Return a prompt's words, one of which no other prompt has."""
    words = [f"canary-{number}"]
    if rng.random() < mix.big:
        length = rng.randint(*mix.big_bytes)
        while length > 0:
            # Of one letter in a text without end: few tokens would be too fast to fail.
            word = f"w{rng.getrandbits(20)}" * rng.randint(1, 6)
            words.append(word)
            length -= len(word) + 1
        return words
    count = 1 + int(rng.expovariate(1 / mix.mean_prompt_words))
    words += [
        rng.choice(_WORDS) if rng.random() < 0.1 else f"w{rng.getrandbits(16)}"
        for _ in range(count)
    ]
    return words


def _draw_chat(rng: random.Random, values: dict[str, Any], words: list[str]) -> None:
    text = " ".join(words)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    kind = rng.random()
    if kind < 0.2:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go on."},
        ]
    elif kind < 0.25:
        messages.append({"role": "assistant", "content": "It begins"})
        values |= {"continue_final_message": True, "add_generation_prompt": False}
    values["messages"] = messages
    if rng.random() < 0.25:
        values["tools"] = TOOLS
        choice = rng.choice(["auto", None, "required", "none", "named"])
        if choice == "named":
            name = rng.choice(TOOLS)["function"]["name"]
            values["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif choice is not None:
            values["tool_choice"] = choice
    if rng.random() < 0.15:
        values["logprobs"] = True
        if rng.random() < 0.7:
            values["top_logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.1:
        values["response_format"] = {"type": rng.choice(["text", "json_object"])}


def _draw_completion(rng: random.Random, values: dict[str, Any], words: list[str]) -> None:
    text = " ".join(words)
    kind = rng.random()
    if kind < 0.6:
        values["prompt"] = text
    elif kind < 0.75:
        # Ids are decided by the words, so that these prompts are one of a kind, too.
        values["prompt"] = [sum(word.encode()) + 3 * i for i, word in enumerate(words)]
        values["prompt"][0] = 20_000 + int(words[0].partition("-")[2])
    elif kind < 0.85:
        values["prompt"] = [text]
    elif kind < 0.95:
        values["prompt"] = [text, f"{words[0]} second", "third"]
    else:
        values["prompt"] = [[20_000 + int(words[0].partition("-")[2]), 7], [9, 10, 11]]
    if rng.random() < 0.15:
        values["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.1:
        values["echo"] = True


def _draw_limits(
    rng: random.Random, values: dict[str, Any], mix: RequestMix, *, chat: bool
) -> None:
    kind = rng.random()
    if kind < 0.75:
        values["max_tokens"] = rng.randint(1, mix.max_tokens)
    elif kind < 0.85 and chat:
        values["max_completion_tokens"] = rng.randint(1, mix.max_tokens)
    limit = values.get("max_tokens", values.get("max_completion_tokens"))
    if limit is not None:
        if rng.random() < 0.15:
            values["ignore_eos"] = True
        if rng.random() < 0.1:
            values["min_tokens"] = rng.randint(0, limit)


def _draw_sampling(rng: random.Random, values: dict[str, Any]) -> None:
    greedy = rng.random() < 0.2
    if greedy:
        values["temperature"] = 0
    elif rng.random() < 0.3:
        values["temperature"] = rng.choice([0.3, 1, 1.5])
    if rng.random() < 0.3:
        values["seed"] = rng.getrandbits(31)
    if rng.random() < 0.2:
        values["top_p"] = 0.9
    if not greedy and rng.random() < 0.12:
        values["n"] = rng.randint(2, 3)
    if rng.random() < 0.15:
        # Some of these will come up: they are a part of many words that the model says.
        values["stop"] = rng.choice([["1"], "77", [" t12", "é"], ["never said", "\n"]])
        if rng.random() < 0.3:
            values["include_stop_str_in_output"] = True
    if rng.random() < 0.05:
        values["stop_token_ids"] = [rng.randrange(16_384) for _ in range(400)]
    if rng.random() < 0.08:
        values["return_token_ids"] = True
    if rng.random() < 0.1:
        values["user"] = "somebody"


def _draw_stream(rng: random.Random, values: dict[str, Any]) -> None:
    kind = rng.random()
    if kind < 0.65:
        values["stream"] = True
        if rng.random() < 0.4:
            options = values["stream_options"] = {"include_usage": rng.random() < 0.9}
            if rng.random() < 0.4:
                options["continuous_usage_stats"] = True
    elif kind < 0.75:
        values["stream"] = False


def _draw_oddity(rng: random.Random, values: dict[str, Any], *, chat: bool) -> bool:
    """Give some member a corner value; return whether it is one that the proxy refuses."""
    odd: dict[str, Any] = rng.choice(
        [
            {"max_tokens": 0},
            {"max_tokens": 10**9},
            {"max_tokens": None},
            {"best_of": 2},
            {"min_tokens": 10**6},
            {"temperature": -1},
            {"stop": ""},
            {"stop": []},
            {"model": "another"},
            {"prompt_logprobs": 2},
            {"logprobs": None},
            {"seed": None, "stream_options": None},
            {"messages": []} if chat else {"prompt": ""},
            # The proxy drops members that steer engines, of any client.
            {"priority": -5, "data_parallel_rank": 99},
            {"kv_transfer_params": {"do_remote_decode": True, "remote_host": "169.254.169.254"}},
            *_FORBIDDEN,
        ]
    )
    values |= odd
    if "max_tokens" in odd and odd["max_tokens"] is None:
        # Else it would go on to the end of the context.
        values.pop("ignore_eos", None)
    return odd in _FORBIDDEN


def _spell(rng: random.Random, values: dict[str, Any]) -> bytes:
    """Return the JSON in one of many spellings."""
    members = list(values.items())
    rng.shuffle(members)
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
    text = json.dumps(dict(members), separators=separators, ensure_ascii=rng.random() < 0.5)
    return text.encode()
