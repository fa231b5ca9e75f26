"""Generation requests: the parsed body of a /v1/chat/completions or /v1/completions."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.lab.emulate.faults import ErrorForm
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.emulate.tokens import (
    decode,
    packed,
    prompt_digest,
    render_chat,
    tokenise,
    word_of,
)

# Errors as vLLM answers them: status, JSON body, and the event that ends a stream.

INTERNAL = "Internal server error"
EMPTY = "Cannot apply chat template to an empty conversation. Provide at least one message."
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class ApiError(BalanceRouteError):
    def __init__(
        self, message: str, *, status: int = 400, kind: str, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind  # The `type` of the error object.
        self.param = param

    @property
    def value(self) -> dict[str, object]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}

    def body(self, form: ErrorForm | None = None) -> bytes:
        return compact(written(self.value, form))

    def event(self, form: ErrorForm | None = None) -> bytes:
        """Return the event of a stream; vLLM writes it with spaces, unlike other events."""
        text = json.dumps(written(self.value, form), ensure_ascii=False)
        return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


def written(value: Mapping[str, Any], form: ErrorForm | None) -> Mapping[str, Any]:
    error: dict[str, Any] = value["error"]
    client = error["code"] < 500
    match form:
        case ErrorForm.WORDS:
            kind = "invalid_request_error" if client else "server_error"
            code = {404: "model_not_found", 429: "rate_limit_exceeded"}.get(error["code"], kind)
            return {"error": error | {"type": kind, "code": code}}
        case ErrorForm.DIGITS:
            return {"error": error | {"code": str(error["code"])}}
        case ErrorForm.NO_CODE:
            return {"error": {name: error[name] for name in ("message", "type")}}
        case ErrorForm.FLAT:
            return {"object": "error", **error}
        case ErrorForm.TYPED:
            kind = "invalid_request_error" if client else "api_error"
            kind = {429: "rate_limit_error"}.get(error["code"], kind)
            return {"type": "error", "error": {"type": kind, "message": error["message"]}}
        case None:
            return value


def bad_request(message: str, *, param: str | None = None) -> ApiError:
    """Return an error of the engine's own checks."""
    return ApiError(message, kind="BadRequestError", param=param)


def bad_parameter(message: str, name: str, value: object = None) -> ApiError:
    """Return an error of the engine's own checks that also names the parameter in its message."""
    shown = "" if value is None else f", value={value}"
    return bad_request(f"{message} (parameter={name}{shown})", param=name)


def invalid(kind: str, place: str, message: str, value: object, **more: object) -> ApiError:
    """Return an error of the body's schema (pydantic's errors, as vLLM prints them)."""
    shown = str(value)
    if isinstance(value, dict | list):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    detail = {"type": kind, "loc": place, "msg": message, "input": shown} | more
    return ApiError(f"1 validation error:\n  {detail}", kind="Bad Request", param=place)


def internal_error(message: str = INTERNAL) -> ApiError:
    return ApiError(message, status=500, kind="InternalServerError")


def unknown_model(name: str, known: str) -> ApiError:
    message = f"The model `{name}` does not exist. Valid aliases: {known}."
    return ApiError(message, status=404, kind="NotFoundError", param="model")


def compact(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


# vLLM's default of the completions API; a chat continues to the end of the context.
DEFAULT_COMPLETION_TOKENS = 16
# vLLM's default of --max-logprobs.
MAX_LOGPROBS = 20
_GREEDY_BELOW = 1e-5
_LARGEST = 1e308  # Of what a float holds; integers are not bounded.
_KINDS: Mapping[str, tuple[type | tuple[type, ...], str, str]] = {
    "int": (int, "int_type", "Input should be a valid integer"),
    "float": ((int, float), "float_type", "Input should be a valid number"),
    "bool": (bool, "bool_type", "Input should be a valid boolean"),
    "dict": (dict, "dict_type", "Input should be a valid dictionary"),
    "list": (list, "list_type", "Input should be a valid list"),
}
_FIELDS: Mapping[str, str] = {
    "max_tokens": "int",
    "max_completion_tokens": "int",
    "min_tokens": "int",
    "n": "int",
    "seed": "int",
    "top_k": "int",
    "top_logprobs": "int",
    "prompt_logprobs": "int",
    "temperature": "float",
    "top_p": "float",
    "min_p": "float",
    "stream": "bool",
    "ignore_eos": "bool",
    "echo": "bool",
    "add_generation_prompt": "bool",
    "continue_final_message": "bool",
    "return_token_ids": "bool",
    "include_stop_str_in_output": "bool",
    "stream_options": "dict",
    "kv_transfer_params": "dict",
    "stop_token_ids": "list",
}
_PENALTIES = ("frequency_penalty", "presence_penalty")
_SAMPLING = ("top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]  # Its token ids.
    text: str | None  # Its text; None if it was sent as token ids.

    @cached_property
    def packed(self) -> bytes:
        return packed(self.tokens)

    @cached_property
    def digest(self) -> bytes:
        """Identifies the prompt's KV cache."""
        return prompt_digest(self.packed)

    @property
    def words(self) -> list[str]:
        """The word of each token: the text's own, as the tokeniser keeps only recent words."""
        return list(map(word_of, self.tokens)) if self.text is None else self.text.split()

    @property
    def said(self) -> str:
        return decode(self.tokens) if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The form of an answer of /inference/v1/generate."""

    text: bool  # Whether it has the text beside the ids.
    prompt_ids: bool  # Whether it has the prompt's ids.


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    chat: bool
    prompts: tuple[Prompt, ...]  # One, or several for a completion.
    n: int  # Choices for each prompt.
    # Limit of each prompt's choices; by default the end of the context.
    max_tokens: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    # Number of candidates with a log-probability, including the token itself; 0 for none, 1 for the
    # token alone.
    logprobs: int
    top_logprobs: int  # How many of these to list.
    prompt_logprobs: int | None  # The same for the prompt's tokens; None for none.
    echo: bool
    return_token_ids: bool
    sampling: bytes  # The parameters that determine the text, with the prompt.
    tools: tuple[Mapping[str, Any], ...]
    tool_choice: str  # "none", "auto", "required" or "named".
    tool_name: str | None
    kv: Mapping[str, Any] | None
    reasoning_parser: bool  # Whether a reasoning parser reads the answer.
    # Whether tokens count that the answer has already, but not those of the prompt.
    penalised: bool = False
    # The JSON schema that the answer follows; None if it is free.
    schema: Mapping[str, Any] | None = None
    # Of a request to /inference/v1/generate; None for any other.
    token_output: TokenOutput | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)


def read_json(body: bytes) -> dict[str, Any]:
    """Return a body that must be a JSON object.

    Raises:
        ApiError: It is not.
    """
    if not body:
        raise invalid("missing", "body", "Field required", None)
    try:
        values = json.loads(body)
    except json.JSONDecodeError as error:
        place = f"body.{error.pos}"
        raise invalid(
            "json_invalid", place, "JSON decode error", {}, ctx={"error": error.msg}
        ) from None
    except (ValueError, RecursionError) as error:  # No UTF-8, or more digits than Python converts.
        raise bad_request(f"There was an error parsing the body: {error}") from None
    if not isinstance(values, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, values)
    return values


def read_generation(
    values: Mapping[str, Any], settings: EmulationSettings, *, chat: bool, clips: bool = False
) -> GenerationRequest:
    """Parse a body of the chat or of the completions API.

    With `clips` a limit past the context is the rest of the context, and no error.

    Raises:
        ApiError: It cannot be served; this is the answer.
    """
    _check_types(values, chat=chat)
    options, stream = values.get("stream_options"), bool(values.get("stream"))
    if options is not None and not stream:
        words = "Stream options can only be defined when `stream=True`."
        raise bad_parameter(words, "stream_options")
    check_model(values, settings)
    tools, tool_choice, tool_name = _tools(values) if chat else ((), "none", None)
    prompts = (_chat_prompt(values),) if chat else _completion_prompts(values)
    n = _or(values.get("n"), 1)
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    limits = tuple(_limit(values, prompt, settings, chat=chat, clips=clips) for prompt in prompts)
    min_tokens = _min_tokens(values, min(limits))
    stop = values.get("stop") or ()
    listed = top_logprobs(values, chat=chat)
    prompt_logprobs = _prompt_logprobs(values, stream=stream)
    _check_logprobs("sample", listed)
    _check_logprobs("prompt", prompt_logprobs)
    echo = bool(values.get("echo")) and not chat
    return GenerationRequest(
        chat=chat,
        prompts=prompts,
        n=n,
        max_tokens=limits,
        min_tokens=min_tokens,
        ignore_eos=bool(values.get("ignore_eos")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(values.get("stop_token_ids") or ()),
        include_stop=bool(values.get("include_stop_str_in_output")),
        stream=stream,
        include_usage=_asks(options, "include_usage"),
        continuous_usage=_asks(options, "include_usage", "continuous_usage_stats"),
        logprobs=0 if listed is None else max(1, listed),
        top_logprobs=listed or 0,
        prompt_logprobs=listed if echo and prompt_logprobs is None else prompt_logprobs,
        echo=echo,
        return_token_ids=bool(values.get("return_token_ids")),
        sampling=_sampling(values, n),
        tools=tools,
        tool_choice=tool_choice,
        tool_name=tool_name,
        kv=values.get("kv_transfer_params"),
        reasoning_parser=chat and settings.reasoning_parser,
        penalised=any(values.get(name) for name in _PENALTIES),
        schema=_schema(values),
    )


def _asks(options: Mapping[str, Any] | None, *names: str) -> bool:
    return options is not None and all(map(options.get, names))


def _schema(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema that the answer is to follow, in the words of vLLM and of OpenAI."""
    form, outputs = values.get("response_format"), values.get("structured_outputs")
    schema: object = None
    if isinstance(outputs, dict):
        schema = outputs.get("json")
    elif isinstance(form, dict) and form.get("type") == "json_schema":
        described = form.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if schema is None:
            raise invalid("missing", "body.response_format.json_schema", "Field required", form)
    return schema if isinstance(schema, dict) else None


def _min_tokens(values: Mapping[str, Any], max_tokens: int) -> int:
    min_tokens: int = _or(values.get("min_tokens"), 0)
    if not 0 <= min_tokens <= max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
            if min_tokens > 0
            else f"min_tokens must be greater than or equal to 0, got {min_tokens}."
        )
    return min_tokens


def _prompt_logprobs(values: Mapping[str, Any], *, stream: bool) -> int | None:
    count: int | None = values.get("prompt_logprobs")
    if count is not None and stream and count >= 0:
        raise bad_parameter(
            "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"
        )
    return count


def top_logprobs(values: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return how many candidates to list with their log-probabilities; None for no such list."""
    if not chat:
        listed: int | None = values.get("logprobs")
        return listed
    return _or(values.get("top_logprobs"), 0) if values.get("logprobs") else None


def _check_logprobs(name: str, count: int | None) -> None:
    if count is None:
        return
    if count < 0:
        raise bad_request(f"{name} logprobs must be a positive value, got {count}.")
    if count > MAX_LOGPROBS:
        raise bad_request(
            f"Requested {name} logprobs of {count}, which is greater than max allowed: "
            f"{MAX_LOGPROBS}"
        )


def check_model(values: Mapping[str, Any], settings: EmulationSettings) -> None:
    """Reject a model that is not served.

    Raises:
        ApiError: The model is another one, or no text. A body without a model, or with "", is accepted.
    """
    model = values.get("model")
    if not isinstance(model, str | None):
        raise invalid("string_type", "body.model", "Input should be a valid string", model)
    if model and model not in (settings.model, *settings.adapters):
        raise unknown_model(model, settings.model)


def chat_text(values: Mapping[str, Any]) -> str:
    """Return the text of a conversation as the chat template renders it.

    Raises:
        ApiError: The messages are malformed.
    """
    messages = values.get("messages")
    if not isinstance(messages, list):
        if messages is None:
            raise invalid("missing", "body.messages", "Field required", dict(values))
        raise invalid("list_type", "body.messages", _KINDS["list"][2], messages)
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid("dict_type", f"body.messages.{number}", _KINDS["dict"][2], message)
    resume = bool(values.get("continue_final_message"))
    if resume and values.get("add_generation_prompt", True):
        raise bad_request(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    return render_chat(
        messages,
        values.get("tools"),
        add_generation_prompt=bool(values.get("add_generation_prompt", True)),
        continue_final_message=resume,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _check_types(values: Mapping[str, Any], *, chat: bool) -> None:
    fields = dict(_FIELDS) | {"logprobs": "bool" if chat else "int"}
    for name, kind in fields.items():
        value = values.get(name)
        accepted, fault, message = _KINDS[kind]
        if value is None or (
            isinstance(value, accepted)
            and (kind == "bool" or not isinstance(value, bool))
            and (not isinstance(value, int | float) or kind != "float" or abs(value) <= _LARGEST)
        ):
            continue
        raise invalid(fault, f"body.{name}", message, value)
    stop = values.get("stop")
    if stop is not None and not isinstance(stop, str):
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise invalid("string_type", "body.stop", "Input should be a valid string", stop)
        if "" in stop:
            raise bad_request("stop cannot contain an empty string.")
    tokens = values.get("stop_token_ids") or []
    if not all(type(token) is int for token in tokens):
        raise invalid("int_type", "body.stop_token_ids", _KINDS["int"][2], tokens)


def _chat_prompt(values: Mapping[str, Any]) -> Prompt:
    text = chat_text(values)
    return _not_empty(Prompt(tokenise(text), text))


def _completion_prompts(values: Mapping[str, Any]) -> tuple[Prompt, ...]:
    given = values.get("prompt")
    if given is None:
        raise invalid("missing", "body.prompt", "Field required", dict(values))
    if isinstance(given, str) or (isinstance(given, list) and _are_tokens(given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise invalid("string_type", "body.prompt", "Input should be a valid string", given)
    prompts: list[Prompt] = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(Prompt(tokenise(prompt), prompt))
        elif isinstance(prompt, list) and _are_tokens(prompt):
            prompts.append(Prompt(prompt, None))
        else:
            raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)
    return tuple(map(_not_empty, prompts))


def _not_empty(prompt: Prompt) -> Prompt:
    if not prompt.tokens:
        raise bad_request("The decoder prompt cannot be empty")
    return prompt


def _are_tokens(value: list[Any]) -> bool:
    return bool(value) and all(type(token) is int and 0 <= token < 2**63 for token in value)


def _limit(
    values: Mapping[str, Any],
    prompt: Prompt,
    settings: EmulationSettings,
    *,
    chat: bool,
    clips: bool,
) -> int:
    """Return how many tokens a prompt's answer may have."""
    longest, length = settings.max_model_len, len(prompt.tokens)
    name = "max_tokens"
    if chat:
        if values.get("max_completion_tokens") is not None:
            name = "max_completion_tokens"
        limit = values.get(name)
    else:
        limit = values.get(name, DEFAULT_COMPLETION_TOKENS)
    if limit is not None and limit < 1:
        raise bad_parameter(f"{name} must be at least 1, got {limit}.", name, limit)
    if limit is not None and limit > longest:
        message = f"{name}={limit} cannot be greater than max_model_len={longest}."
        raise bad_parameter(f"{message} Please request fewer output tokens.", name, limit)
    message = f"This model's maximum context length is {longest} tokens. However, "
    if length > longest or (limit is None and length == longest):
        least = min(length, longest + 1)  # The tokeniser reads no further.
        message += (
            f"your prompt contains at least {least} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt."
        )
        raise bad_parameter(message, "input_tokens", least)
    if limit is None:
        return longest - length
    if length + limit > longest and clips:
        return longest - length
    if length + limit > longest:
        least = longest - limit + 1
        message += (
            f"you requested {limit} output tokens and your prompt contains at least {least} input "
            f"tokens, for a total of at least {least + limit} tokens. Please reduce the length of "
            "the input prompt or the number of requested output tokens."
        )
        raise bad_parameter(message, "input_tokens", least)
    return int(limit)


def _tools(values: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], str, str | None]:
    """Return the tools, the tool choice, and the name of the named one."""
    tools = values.get("tools") or []
    if not isinstance(tools, list):
        raise invalid("list_type", "body.tools", _KINDS["list"][2], tools)
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            place = f"body.tools.{number}.function.name"
            raise invalid("missing", place, "Field required", tool)
    choice = values.get("tool_choice")
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in [tool["function"]["name"] for tool in tools]:
            raise bad_request("The tool specified in `tool_choice` does not match any of the tools")
        return tuple(tools), "named", name
    if choice not in ("none", "auto", "required"):
        raise bad_request(f"Invalid value for `tool_choice`: {choice}!")
    if choice != "none" and not tools:
        raise bad_request("When using `tool_choice`, `tools` must be set.")
    if choice == "auto" and values.get("continue_final_message"):
        choice = "none"  # A continued text stays a text.
    return tuple(tools), choice, None


def _sampling(values: Mapping[str, Any], n: int) -> bytes:
    """Return a hash of the parameters that determine the text, with the prompt."""
    temperature = values.get("temperature")
    if temperature is None:
        temperature = 1.0
    if temperature < 0:
        message = f"temperature must be non-negative, got {temperature}."
        raise bad_parameter(message, "temperature", temperature)
    if temperature < _GREEDY_BELOW:
        if n > 1:
            raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
        decisive: list[object] = []
    else:
        decisive = [float(temperature), *(values.get(name) for name in _SAMPLING)]
        kv = values.get("kv_transfer_params") or {}
        if values.get("seed") is None and kv.get("do_remote_decode") is True:
            decisive.append("apart")  # No two engines draw alike without a seed.
    return hashlib.blake2b(json.dumps(decisive).encode(), digest_size=16).digest()


# Requests to /inference/v1/generate: token ids, and the limits in `sampling_params` (vLLM 0.32).

_OURS = ("model", "stream", "stream_options", "kv_transfer_params")
_MODES = ("tokens", "text")


def read_tokens(values: Mapping[str, Any], settings: EmulationSettings) -> GenerationRequest:
    """Parse a body.

    Raises:
        ApiError: It cannot be served; this is the answer.
    """
    ids, sampling = values.get("token_ids"), values.get("sampling_params")
    for name, value, kind in (("token_ids", ids, list), ("sampling_params", sampling, dict)):
        if name not in values:
            raise invalid("missing", f"body.{name}", "Field required", dict(values))
        if not isinstance(value, kind):
            message = f"Input should be a valid {'list' if kind is list else 'object'}"
            raise invalid(f"{kind.__name__}_type", f"body.{name}", message, value)
    assert isinstance(ids, list)
    assert isinstance(sampling, dict)
    if not ids:
        message = "List should have at least 1 item after validation, not 0"
        raise invalid("too_short", "body.token_ids", message, ids)
    mode = values.get("output_mode", "tokens")
    if mode not in _MODES:
        message = "Input should be 'tokens' or 'text'"
        raise invalid("literal_error", "body.output_mode", message, mode)
    room, slots = settings.max_model_len - len(ids), settings.batch_limit
    choices = sampling.get("n")
    if type(choices) is int and choices > slots:
        most = f"at most the server's max_num_seqs ({slots})"
        raise bad_request(f"sampling_params.n must be {most}, got {choices}.")
    limit = sampling.get("max_tokens")
    if type(limit) is int and limit < 1:
        raise bad_request(f"max_tokens must be at least 1, got {limit}.")
    asked = {
        **sampling,
        **{name: values[name] for name in _OURS if name in values},
        "prompt": ids,
        "return_token_ids": True,
        # Without a limit to the end of the context, which also ends an answer with a larger one.
        "max_tokens": room if limit is None else min(limit, max(room, 1)),
    }
    output = TokenOutput(mode == "text", bool(values.get("return_token_ids")))
    return replace(read_generation(asked, settings, chat=False), token_output=output)
