"""What a generation request asks for, as far as routing depends on it.

A request takes the **PD** path (prefill leg, pool, decode leg) unless its answer needs something
that only the engine which computes the prompt can give, or that one KV cache cannot carry. Those go
**direct**: one engine does all of it (`direct` says which), and the answer is exactly that engine's.
"""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct

from balanceroute.proxy.live.openai.body import BodyError, RequestBody, is_deep
from balanceroute.proxy.live.openai.json_scan import PromptSummary

# Numbers and flags of a request, read as vLLM 0.32 reads them: pydantic's lax mode.
#
# Only the members that the proxy itself goes by are read: `stream`, `n`, the limits of the
# answer, `truncate_prompt_tokens`, and `priority`, which no engine gets. All other ones (`seed`,
# `temperature`, `top_p`, `top_k`, penalties, `logprobs`, `stop_token_ids`, ...) reach both legs
# as the client wrote them and nothing here calculates with them, so their refusal is an engine's,
# on the prefill leg, before anything was computed. vLLM ignores `best_of`; so does the proxy.

MOST_TOKENS = 2**31 - 1
"""The largest limit of an answer that is calculated with. No context is this long."""

_LEAST_INT64, _MOST_INT64 = -(2**63), 2**63 - 1
# Python converts no text of more digits, and neither does pydantic.
_MAX_DIGITS = 4300
_INTEGER = re.compile(r"\s*([+-]?\d+(?:_\d+)*)(?:\.0*)?\s*", re.ASCII)
_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def integer(value: object) -> int | None:
    """Return the integer that a decoded value is taken for; None if it is none."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else None
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        found = _INTEGER.fullmatch(value)
        return None if found is None else int(found[1])
    return None


def flag(value: object) -> bool | None:
    """Return the truth value that a decoded value is taken for; None if it is none."""
    if isinstance(value, str):
        return _FLAGS.get(value.lower())
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return None


def count(value: object, least: int) -> int | None:
    """Return an integer of at least `least`, at most `MOST_TOKENS`; None if it is none."""
    number = value if type(value) is int else integer(value)
    if number is None or number < least:
        return None
    return min(number, MOST_TOKENS)


def check_priority(value: object) -> None:
    """Refuse a `priority` that vLLM refuses: engines do not get it, so they cannot.

    Raises:
        BodyError: It is not an integer of 64 bits. The words are vLLM's.
    """
    number = integer(value)
    if number is None:
        raise BodyError("priority: Input should be a valid integer", "priority")
    if number > _MOST_INT64:
        most = f"less than or equal to {_MOST_INT64}"
        raise BodyError(f"priority: Input should be {most}", "priority")
    if number < _LEAST_INT64:
        least = f"greater than or equal to {_LEAST_INT64}"
        raise BodyError(f"priority: Input should be {least}", "priority")


# Never taken from a client: they steer KV transfer or engine-internal routing.
INTERNAL_FIELDS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "disagg_prefill_resp",
        "disagg_spec",
        "ec_transfer_params",
        "kv_transfer_params",
        "metaserver",
        "priority",
        "remote_kv_source",
        "request_id",
        "ret_first_tok",
    }
)
# A client's own name for a prompt, which engines prefer to that in a header.
SESSION_MEMBER = frozenset({"session_id"})
# See `_rare_member`.
_RARE = frozenset(
    {
        "echo",
        "min_tokens",
        "prompt_embeds",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)
COMPLETION_TOKENS = 16
"""vLLM's limit of a completion that names none; a chat's is what the context leaves."""
# With the least value that is good.
_REPLACED = (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0))
# What agents send ahead of their messages is often longer than these.
_BEFORE_MESSAGES = ("instructions", "system", "tools")
CALLED_BY_ENGINES = ("code_interpreter", "container", "mcp", "web_search_preview")
"""Tools of /v1/responses that vLLM calls itself, with a tool server (`extract_tool_types`). Codex sends
`web_search`, which is none of them."""
# The engine then goes on, with all that the request had. A letter that is escaped for no reason may spell one.
_MAY_BE_CALLED = re.compile(
    rb'"type"\s*+:\s*+"(?:%b)"' % "|".join(CALLED_BY_ENGINES).encode()
    + rb"|\\u00(?:5f|6[1-9a-f]|7[0-9a])",
    re.IGNORECASE,
)


class Api(Enum):
    """The generation endpoints, by the text that their answers carry."""

    # Enum's own hash is Python code, and every request looks its endpoint up.
    __hash__ = object.__hash__

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"


CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = (
    Api.CHAT,
    Api.COMPLETIONS,
    Api.RESPONSES,
    Api.MESSAGES,
    Api.GENERATE,
)


class Shape(Struct, frozen=True):
    """A request, as far as routing depends on it."""

    api: Api
    model: str  # The `model` member, "" if it is absent.
    stream: bool
    sequences: int  # How many answers the engine decodes at a time.
    # The member, or the endpoint, for which one engine has to do the whole request; "" if none has
    # to.
    direct: str
    prompt_tokens: int | None  # Exact for token ids; else None.
    # Length of a prompt's text (the mean, if there are several), keys and data left out; at the
    # agents' endpoints with the text ahead of the messages. It matters if `prompt_tokens` is None.
    prompt_characters: int
    prompt_data: int  # Images, sounds and files in the prompt.
    max_tokens: int | None  # The limit of the answer, at most `MOST_TOKENS`; None if there is none.
    # Whether its engine may send nothing for many steps: a parser of tool calls waits until one is
    # whole.
    holds_back: bool = False


def read_shape(api: Api, body: RequestBody, *, max_sequences: int, internal: bool = False) -> Shape:
    """Return what `body` asks for, which may have members of KV transfer if they are not the client's (`internal`).

    Only what routing depends on is judged here. Anything else that is wrong goes to an engine, whose
    answer is the true one.

    Raises:
        BodyError: A member that routing depends on is of the wrong type or out of range.
    """
    values = body.values
    model, stream = _model_and_stream(api, values)
    member = PROMPT_MEMBER[api]
    prompt = body.summary(member)
    prompts, tokens = _prompts(prompt) if api is COMPLETIONS else (1, None)
    # vLLM would merge them with its own parameters for KV transfer.
    if not internal:
        refuse_internal(values.get("vllm_xargs"), "vllm_xargs")
    sequences, limit = prompts, count(_limit(api, values), 1)
    characters = prompt.characters // prompts
    if api in AGENTS_APIS:
        direct = _agent_needs_one_engine(api, body, member=member, limit=limit)
        characters += sum(len(body.value_text(name)) for name in _BEFORE_MESSAGES)
    else:
        n = values.get("n")
        sequences = prompts if n is None else _answers(n, max_sequences) * prompts
        options = values.get("stream_options")
        # The prefill leg has none, so a bad one would be found out only after a prefill.
        spoils = "" if options is None or _are_good(options, stream=stream) else "stream_options"
        direct = _needs_one_engine(api, body, sequences, member=member, limit=limit) or spoils
    if sequences > max_sequences:
        raise BodyError(f"the request asks for {sequences} answers, at most {max_sequences}", "n")
    return Shape(
        api=api,
        model=model,
        stream=stream,
        sequences=sequences,
        direct=direct,
        prompt_tokens=tokens,
        prompt_characters=characters or 1,
        prompt_data=prompt.data_strings,
        max_tokens=limit,
        holds_back=bool(values.get("tools")),
    )


def _model_and_stream(api: Api, values: Mapping[str, Any]) -> tuple[str, bool]:
    model, stream = values.get("model"), values.get("stream")
    if model is not None and not isinstance(model, str):
        raise BodyError("model must be a string", "model")
    stream = False if stream is None else flag(stream)
    if stream is None:
        raise BodyError("stream must be true or false", "stream")
    # Anthropic's has none, and ignores what it does not know.
    if "priority" in values and api is not MESSAGES:
        check_priority(values["priority"])
    return model or "", stream


PROMPT_MEMBER: dict[Api, str] = {
    Api.CHAT: "messages",
    Api.COMPLETIONS: "prompt",
    Api.RESPONSES: "input",
    Api.MESSAGES: "messages",
    Api.GENERATE: "token_ids",
}
TAKES_IDS = frozenset({Api.COMPLETIONS, Api.GENERATE})
"""The endpoints whose prompts may be token ids."""
AGENTS_APIS = frozenset({Api.RESPONSES, Api.MESSAGES})
"""The endpoints whose streams are named events. They ignore members of other endpoints: `n`, `min_tokens`, ..."""
OPTIONAL_APIS = AGENTS_APIS | {Api.GENERATE}
"""The endpoints that not every engine has."""
LIMIT_MEMBER: dict[Api, str] = {
    Api.CHAT: "max_tokens",  # And `max_completion_tokens`, which goes before it.
    Api.COMPLETIONS: "max_tokens",
    Api.RESPONSES: "max_output_tokens",
    Api.MESSAGES: "max_tokens",
}
"""The member that limits the answer."""


def _answers(n: object, most: int) -> int:
    number = integer(n)
    if number is None or not 1 <= number <= most:
        raise BodyError(f"n must be an integer from 1 to {most}", "n")
    return number


def refuse_internal(members: object, where: str) -> None:
    """Raise BodyError if a decoded value, found at `where`, is an object with internal members."""
    if isinstance(members, dict) and not INTERNAL_FIELDS.isdisjoint(members):
        raise BodyError(f"{where} must not have {min(INTERNAL_FIELDS & members.keys())}", where)


def _prompts(prompt: PromptSummary) -> tuple[int, int | None]:
    """Return the number of prompts, and the mean tokens of each if they are given as ids."""
    if prompt.elements == 0:
        return 1, None
    if prompt.integers == prompt.elements:
        return 1, prompt.elements
    if prompt.arrays == prompt.elements:
        return prompt.elements, max(1, prompt.inner // prompt.elements)
    return prompt.elements, None


def _are_good(options: object, *, stream: bool) -> bool:
    """Return whether engines take these `stream_options`."""
    if not stream:
        return not options
    if not isinstance(options, dict):
        return False
    wishes = options.get("include_usage"), options.get("continuous_usage_stats")
    return all(wish is None or flag(wish) is not None for wish in wishes)


def _limit(api: Api, values: Mapping[str, Any]) -> object:
    limit = None if api in AGENTS_APIS else values.get("max_completion_tokens")
    return values.get(LIMIT_MEMBER[api]) if limit is None else limit


def _needs_one_engine(
    api: Api, body: RequestBody, sequences: int, *, member: str, limit: int | None
) -> str:
    """Return the member, or the endpoint, for which one engine has to do the whole request."""
    values = body.values
    # vLLM's refusal of a body without its prompt shows the whole body, which must be the client's.
    if member not in values:
        return member
    # A decode engine makes a request of each sequence, and each pulls for itself. The first that has the
    # KV cache frees it: with vLLM 0.32's Mooncake the second waits for ever (seen), with NIXL it reads
    # blocks that may be another prompt's by then (`PullWorker._get_new_notifs`).
    if sequences > 1:
        return "prompt" if integer(values.get("n")) in (None, 1) else "n"
    if not _RARE.isdisjoint(values):
        rare = _rare_member(api, body, limit)
        if rare:
            return rare
    # The prefill leg replaces these, so a bad value would be found out only after a prefill.
    for name, least in _REPLACED:
        value = values.get(name)
        if value is None or (type(value) is int and value >= least):
            continue
        if count(value, least) is None:
            return name
    return ""


def _agent_needs_one_engine(api: Api, body: RequestBody, *, member: str, limit: int | None) -> str:
    values = body.values
    needed = ("model", member, "max_tokens") if api is MESSAGES else (member,)
    for name in needed:
        if name not in values:
            return name
    # The prefill leg has another limit, so a bad one would be found out only after a prefill.
    name = LIMIT_MEMBER[api]
    if limit is None and (api is MESSAGES or values.get(name) is not None):
        return name
    if api is MESSAGES:
        # vLLM reads the arguments of the call that it demands, which one token does not complete.
        choice = values.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "tool":
            return "tool_choice"
        # A rank refuses to think for longer than it may answer; a prefiller lets it pass.
        thinking = values.get("thinking")
        budget = integer(thinking.get("budget_tokens")) if isinstance(thinking, dict) else None
        return "thinking" if budget is not None and limit is not None and budget >= limit else ""
    # vLLM cuts the prompt to what the limit leaves of the context, so the legs would differ in it.
    if "truncation" in values and values["truncation"] != "disabled":
        return "truncation"
    # The engine goes on behind the call with the parameters of a transfer that is over.
    if body.is_given("tools") and _MAY_BE_CALLED.search(body.value_text("tools")):
        return "tools"
    return ""


def _rare_member(api: Api, body: RequestBody, limit: int | None) -> str:
    """Return a member for which one engine has to do the whole request, of those few clients give."""
    values = body.values
    # Log-probabilities of the prompt exist only where the prompt is computed. An echo of the prompt
    # would be missing if the prefill's one token were the whole answer.
    for name in ("use_beam_search", "echo"):
        if values.get(name):
            return name
    if body.is_given("prompt_embeds"):
        return "prompt_embeds"
    if values.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    # -1 cuts the prompt to what max_tokens leaves of the context, so the legs would differ in it.
    truncate = values.get("truncate_prompt_tokens")
    if truncate is not None and count(truncate, 0) is None:
        return "truncate_prompt_tokens"
    least_wanted = count(values.get("min_tokens"), 0)
    if api is COMPLETIONS and "max_tokens" not in values:
        limit = COMPLETION_TOKENS
    if limit is not None and least_wanted is not None and least_wanted > limit:
        return "min_tokens"
    return ""


def refuse_state(api: Api, body: RequestBody) -> None:
    """Refuse a request that needs an earlier response, or is to be asked for later.

    vLLM keeps responses in the memory of one engine (and only with VLLM_ENABLE_RESPONSES_API_STORE),
    and the next request may reach another one. `store` passes: it is true by default, and vLLM
    ignores it too where it keeps nothing.

    Raises:
        BodyError: It has `previous_response_id` or `background`.
    """
    if api is not RESPONSES:
        return
    if body.values.get("previous_response_id") is not None:
        raise BodyError(
            "previous_response_id is not served: responses are not kept. "
            "Send the whole conversation in `input`",
            "previous_response_id",
        )
    if body.values.get("background"):
        raise BodyError(
            "background is not served: responses are not kept, so nobody could fetch the answer",
            "background",
        )


# What a request to `/inference/v1/generate` asks for: token ids in, token ids out (vLLM 0.32).
#
# Its limits stand in `sampling_params`, which vLLM reads as its own `SamplingParams`. As
# everywhere only what routing depends on is judged; anything else that is wrong is an engine's to
# refuse.

SAMPLING = "sampling_params"
PROMPT = "token_ids"
# A prompt that is more than its ids: only the engine that computes it knows how long it becomes.
_MEDIA = ("content_parts", "features")
# What only the engine that computes the prompt can say.
_OF_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids", "trace_decode_token_ids")
# With the least value that is good: the prefill leg replaces them.
_REPLACED_SAMPLING = (("max_tokens", 1), ("min_tokens", 0))


def read_token_shape(body: "RequestBody", *, max_sequences: int, internal: bool = False) -> Shape:
    """Return what `body` asks for; `internal` as in `read_shape`.

    Raises:
        BodyError: A member that routing depends on is of the wrong type or out of range.
    """
    values = body.values
    sampling = values.get(SAMPLING)
    model, stream = _model_and_stream(GENERATE, values)
    prompt = body.summary(PROMPT)
    given: Mapping[str, Any] = sampling if isinstance(sampling, dict) else {}
    if not internal:
        refuse_internal(values.get("vllm_xargs"), "vllm_xargs")
        refuse_internal(given.get("extra_args"), f"{SAMPLING}.extra_args")
    # A number of answers that cannot be read is the engine's to refuse.
    sequences = max(1, integer(given.get("n", 1)) or 1)
    if sequences > max_sequences:
        raise BodyError(f"the request asks for {sequences} answers, at most {max_sequences}", "n")
    ids = prompt.elements == prompt.integers > 0
    return Shape(
        api=Api.GENERATE,
        model=model,
        stream=stream,
        sequences=sequences,
        direct=_ids_need_one_engine(body, sampling, sequences, ids=ids),
        prompt_tokens=prompt.elements if ids else None,
        prompt_characters=1,
        prompt_data=0,
        max_tokens=count(given.get("max_tokens"), 1),
    )


def one_token(sampling: Mapping[str, Any], min_tokens: int) -> dict[str, Any]:
    """Return the sampling parameters of a prefill leg."""
    return {**sampling, "max_tokens": 1, "min_tokens": min_tokens, "n": 1}


def _ids_need_one_engine(
    body: "RequestBody", sampling: object, sequences: int, *, ids: bool
) -> str:
    """Return the member for which one engine has to do the whole request; empty if none has to."""
    if not ids:
        return PROMPT
    if not isinstance(sampling, dict) or is_deep(sampling):
        return SAMPLING
    for name in _MEDIA:
        if body.is_given(name):
            return name
    if sequences > 1 or integer(sampling.get("n", 1)) != 1:
        return f"{SAMPLING}.n"  # As in `shape.py`: each sequence would pull for itself.
    for name in _OF_PROMPT:
        if sampling.get(name) is not None:
            return f"{SAMPLING}.{name}"
    for name, least in _REPLACED_SAMPLING:
        if sampling.get(name) is not None and count(sampling[name], least) is None:
            return f"{SAMPLING}.{name}"
    limit, wanted = count(sampling.get("max_tokens"), 1), count(sampling.get("min_tokens"), 0)
    if limit is not None and wanted is not None and wanted > limit:
        return f"{SAMPLING}.min_tokens"
    return ""


# How many tokens a prompt will have, before an engine has counted them.
#
# Text has a number of characters a token, which is learnt from what prefillers count. An image, a
# sound or a file has as many tokens as the model makes of it, which its base64 does not show. It
# counts as a constant until the prefiller counts it, and teaches nothing about text.

# A first guess; and of a prompt that is mostly text it is never outside of these.
CHARACTERS_PER_TOKEN = 4.0
_LEAST_RATIO, _MOST_RATIO = 0.5, 8.0
# Weight of one more prompt in the running mean.
_WEIGHT = 1 / 32
# Of an image, a sound or a file. vLLM makes some 600 to 1,400 tokens of an image of a megapixel.
DATA_TOKENS = 1_000
# Of all sequences of a request; sums of these stay far below 2^63.
_MOST_TOKENS = 2**30


class TokenEstimate:
    """Learns how many characters a token has."""

    def __init__(self) -> None:
        self._characters_per_token = CHARACTERS_PER_TOKEN

    def tokens(self, shape: "Shape") -> int:
        """Return what a prompt of the request is taken to have: exact for token ids, at least 1."""
        tokens = shape.prompt_tokens
        if tokens is None:
            tokens = round(shape.prompt_characters / self._characters_per_token)
            tokens += DATA_TOKENS * shape.prompt_data
        return max(1, min(tokens, _MOST_TOKENS // shape.sequences))

    def learn(self, shape: "Shape", prompt_tokens: int) -> None:
        """Learn from the count of a prompt, unless the count is not of its text alone."""
        if shape.prompt_tokens is not None or shape.prompt_data:
            return
        ratio = shape.prompt_characters / prompt_tokens
        if _LEAST_RATIO <= ratio <= _MOST_RATIO:
            self._characters_per_token += _WEIGHT * (ratio - self._characters_per_token)


# As vLLM's `SamplingParams`: below, the most likely token is taken.
_GREEDY_BELOW = 1e-5
CONTINUED_AT = {
    Api.CHAT: Api.COMPLETIONS,
    Api.COMPLETIONS: Api.COMPLETIONS,
    Api.GENERATE: Api.GENERATE,
}
"""The endpoint at which an answer of another one goes on."""


def sampling_of(kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the members that say how tokens are drawn and how many; `kept` as by `continuable`."""
    sampling: Mapping[str, Any] = kept.get(SAMPLING, kept)
    return sampling


def is_greedy(kept: Mapping[str, Any]) -> bool:
    """Return whether each token is the most likely one."""
    temperature = sampling_of(kept).get("temperature")
    return isinstance(temperature, int | float) and 0 <= temperature < _GREEDY_BELOW
