"""The two legs: their bodies, the prefill's answer, and the limit of the context.

A body is the client's own, with the documented overrides and nothing else.

Prefill leg: one token, one sequence, no stream, nothing stored. Both legs: the connector's
`kv_transfer_params`, and never a client's (`read_shape` refuses them within `vllm_xargs`). Both must
tokenise alike, so nothing that reaches the prompt is touched.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.answer import ABORT, CANCELLED
from balanceroute.proxy.live.openai.body import BodyError, RequestBody, is_deep, may_be_deep
from balanceroute.proxy.live.openai.shape import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    INTERNAL_FIELDS,
    LIMIT_MEMBER,
    MESSAGES,
    RESPONSES,
    SAMPLING,
    Api,
    count,
    integer,
    one_token,
    refuse_internal,
)
from balanceroute.proxy.live.openai.stream_reader import decode
from balanceroute.proxy.live.openai.token_counts import CountsAsked, PromptUsage, token_count
from balanceroute.proxy.wire.messages import Payload

# A text: to encode the members costs more than all the rest of the body.
_ONE_TOKEN = b'"stream": false, "max_tokens": 1, "min_tokens": %d, "n": 1, '
_PAST_END = b'"ignore_eos": true, '
_NEWER_LIMIT = b'"max_completion_tokens": 1, '
# No `min_tokens` there: vLLM's messages may end at once, and its responses are not to.
_ONE_OF_MESSAGE = b'"stream": false, "max_tokens": 1, '
_ONE_OF_RESPONSE = b'"stream": false, "max_output_tokens": 1, "ignore_eos": true, "store": false, '
# None of these is the client's on the prefill leg.
_REPLACED = frozenset(
    {
        "best_of",
        "max_completion_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "stream",
        "stream_options",
    }
)
_REPLACED_IN_AGENTS = frozenset(
    {"ignore_eos", "max_output_tokens", "max_tokens", "store", "stream", "stream_options"}
)
_ASKED = frozenset({"stream_options"})
# What may end an answer, beside its limit.
_ENDS = frozenset({"ignore_eos", "stop", "stop_token_ids"})
_REPLACED_PAST_END = _REPLACED | _ENDS
# Members that bind the answer to a grammar, in the words of all versions.
_GRAMMARS = (
    *("structured_outputs", "structural_tag", "guided_json", "guided_regex", "guided_choice"),
    "guided_grammar",
)
_NAMED = ("response_format", "tool_choice")
_MAY_BIND = frozenset(_GRAMMARS) | frozenset(_NAMED)
# What leaves an answer free, by these two.
_FREE = re.compile(rb'|null|"(?:auto|none)"|\{\s*"type"\s*:\s*"text"\s*\}')


@cache
def _union(drop: frozenset[str], replaced: frozenset[str]) -> frozenset[str]:
    return drop | replaced


def prefill_body(
    body: RequestBody,
    members: Mapping[str, object],
    params: bytes,
    *,
    api: Api = Api.COMPLETIONS,
    drop: frozenset[str] = INTERNAL_FIELDS,
    min_tokens: int = 1,
    past_end: bool = False,
) -> Payload:
    """Return the prefill leg's body.

    Args:
        body: The client's.
        members: Changed by an earlier binding; see `resumed_members`.
        params: The connector's, as JSON.
        api: The endpoint, which says where the limits stand.
        drop: Members of the client's that no engine gets.
        min_tokens: 0 if the first token may be one that ends the answer; by `least_tokens`.
        past_end: Whether it does not end it then: the rank draws anew, so that is for it to say.
    """
    replaced = _REPLACED
    if api is GENERATE:
        sampling = members[SAMPLING] if SAMPLING in members else body.values[SAMPLING]
        assert isinstance(sampling, Mapping)
        if past_end:
            sampling = {name: value for name, value in sampling.items() if name not in _ENDS}
            sampling["ignore_eos"] = True
        members = {**members, SAMPLING: one_token(sampling, min_tokens)}
    if api is MESSAGES or api is RESPONSES:
        one = _ONE_OF_MESSAGE if api is MESSAGES else _ONE_OF_RESPONSE
        replaced = _REPLACED_IN_AGENTS
    else:
        one = _ONE_TOKEN % min_tokens
        if "max_completion_tokens" in body.values:
            one += _NEWER_LIMIT
        if past_end and api is not GENERATE:
            one, replaced = one + _PAST_END, _REPLACED_PAST_END
    last = b'%b"kv_transfer_params": %b' % (one, params)
    if members:
        members = {name: value for name, value in members.items() if name not in replaced}
    return body.encode(members, drop=_union(drop, replaced), last=last)


def least_tokens(api: Api, body: RequestBody) -> int:
    """Return how many tokens a prefill leg must have: 0 if its grammar may allow none.

    Elsewhere one is asked for, as not every connector keeps the KV cache of an answer that has ended.
    A grammar whose first token is the end leaves no legal one then, and engines fail. They draw that
    token, but do not end there (`past_end` of `prefill_body`). /v1/messages has no member for it.
    /v1/responses has one that lets an answer go on behind its end, grammar or not.
    """
    if api is MESSAGES:
        return 0
    if api is RESPONSES:
        return 1
    values: Mapping[str, object] = body.values
    if api is GENERATE:
        sampling = values.get(SAMPLING)
        values = sampling if isinstance(sampling, Mapping) else {}
        bound = values.get("structured_outputs") is not None
    else:
        bound = not _MAY_BIND.isdisjoint(values) and (
            any(map(body.is_given, _GRAMMARS))
            or any(not _FREE.fullmatch(body.value_text(name)) for name in _NAMED)
        )
    return 0 if bound and not count(values.get("min_tokens"), 1) else 1


def decode_body(
    body: RequestBody,
    members: Mapping[str, object],
    params: bytes | None,
    asked: CountsAsked | None = None,
    *,
    drop: frozenset[str] = INTERNAL_FIELDS,
) -> Payload:
    """Return the decode leg's body.

    Args:
        body: The client's.
        members: Changed by an earlier binding; see `resumed_members`.
        params: The connector's, as JSON; None if the engine is to compute the prompt itself.
        asked: Which counts the engine is asked for.
        drop: Members of the client's that no engine gets.
    """
    last = b"" if params is None else b'"kv_transfer_params": ' + params
    if asked is not None and members:
        members = {**members, "stream_options": asked.options}
    elif asked is not None:  # Nearly always: its text is there already.
        last = asked.member + b", " + last if last else asked.member
        drop = _union(drop, _ASKED)
    return body.encode(members, drop=drop, last=last)


def engine_body(data: bytes, body: RequestBody) -> bytes:
    """Return a client's body as it may reach the one engine that generates text for it.

    The members that steer KV transfer must not be a client's. They stand in the body and in `vllm_xargs`.

    Raises:
        BodyError: An internal member stands where it cannot be cut out.
    """
    values = body.values
    refuse_internal(values.get("vllm_xargs"), "vllm_xargs")
    if INTERNAL_FIELDS.isdisjoint(values):
        return data
    return bytes(body.encode({}, drop=INTERNAL_FIELDS))


# What a prefiller answers.

# No context is this long; a larger count is wrong, and would spoil the ledger of the loads.
_MAX_TOKENS = 1 << 30


class _Members(Struct):
    """The members of an answer that are read; the rest is decoded only if it is asked for."""

    usage: Any = None
    choices: Any = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    content: Any = None
    output: Any = None
    status: Any = None
    stop_reason: Any = None


_decode_members = msgspec.json.Decoder(_Members).decode


class BadPrefillAnswerError(BalanceRouteError):
    """The answer is not one to a completion request."""


class PrefillAnswer(Struct, frozen=True):
    """The parts that matter."""

    prompt_tokens: int  # The prompt's length, s_i.
    # Its cached tokens; None if the engine does not report them.
    usage: PromptUsage | None
    aborted: bool  # Whether the engine gave the request up.
    complete: bool  # Whether the one token ended the answer, by a stop condition.
    kv_transfer_params: object  # For the decoder, as returned; None if absent.
    params_text: bytes  # The same as it was written; empty if the answer is no strict JSON.
    body: bytes  # The answer.

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were found in the prefix cache; None if the engine does not say."""
        return None if self.usage is None else self.usage.cached_tokens

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = decode(self.body)
        return message


def read_prefill_answer(
    body: bytes, prompt_tokens: int | None = None, *, api: Api = Api.COMPLETIONS
) -> PrefillAnswer:
    """Parse a prefiller's answer.

    Args:
        body: The answer.
        prompt_tokens: The prompt's length if that is known: the answers of vLLM's Rust frontend to
            token ids have no usage.
        api: The endpoint that was asked.

    Raises:
        BadPrefillAnswerError: It is no JSON object with an answer and usage.
    """
    if not body.isascii():  # Members that are not parsed here must be valid UTF-8 too.
        _check_text(body)
    read, params, params_text = _parse(body)
    usage = read.usage
    if usage is None and prompt_tokens is not None:
        usage = {"prompt_tokens": prompt_tokens}
    if not isinstance(usage, dict):
        raise BadPrefillAnswerError("the prefill answer has no usage")
    reason: object
    if api is MESSAGES:
        tokens, cached = _count_message(usage)
        reason = _reason_of_message(read)
    elif api is RESPONSES:
        tokens, cached = _count(usage, "input_tokens", "cache_write_tokens")
        reason = _reason_of_response(read)
    else:
        tokens, cached = _count(usage, "prompt_tokens", "created_cache_tokens")
        choices = read.choices
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise BadPrefillAnswerError("the prefill answer has no choices")
        reason = choices[0].get("finish_reason")
    if tokens is None or not 1 <= tokens <= _MAX_TOKENS:
        raise BadPrefillAnswerError("the prefill answer does not count the prompt's tokens")
    complete = reason not in (None, "length")
    # Only what may be encoded again.
    if may_be_deep(body) and is_deep(decode(body) if complete else params):
        raise BadPrefillAnswerError("the prefill answer is nested too deeply")
    return PrefillAnswer(
        prompt_tokens=tokens,
        usage=None if cached is None or cached.cached_tokens > tokens else cached,
        aborted=reason == ABORT,
        complete=complete,
        kv_transfer_params=params,
        params_text=params_text,
        body=body,
    )


def _count(usage: dict[str, Any], name: str, written: str) -> tuple[int | None, PromptUsage | None]:
    """Return the tokens of a prompt, and which of them were cached, by OpenAI's usage."""
    tokens, details = token_count(usage, name), usage.get(f"{name}_details")
    cached = token_count(details, "cached_tokens")
    if cached is None:
        return tokens, None
    return tokens, PromptUsage(cached, token_count(details, written))


def _count_message(usage: dict[str, Any]) -> tuple[int | None, PromptUsage | None]:
    """Return the same by Anthropic's usage, which counts apart what was cached."""
    rest = token_count(usage, "input_tokens")
    cached = token_count(usage, "cache_read_input_tokens")
    written = token_count(usage, "cache_creation_input_tokens")
    if rest is None:
        return None, None
    prompt = None if cached is None else PromptUsage(cached, written)
    return rest + (cached or 0) + (written or 0), prompt


def _reason_of_message(read: _Members) -> str:
    """Return why a message ended, in the words of the chat API."""
    if not isinstance(read.content, list):
        raise BadPrefillAnswerError("the prefill answer has no content")
    if read.stop_reason is None:
        return ABORT  # It has no word for it.
    return "length" if read.stop_reason == "max_tokens" else "stop"


def _reason_of_response(read: _Members) -> str:
    if not isinstance(read.output, list):
        raise BadPrefillAnswerError("the prefill answer has no output")
    if read.status in (CANCELLED, "failed"):
        return ABORT
    return "length" if read.status == "incomplete" else "stop"


def _check_text(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError:
        raise BadPrefillAnswerError("the prefill answer is no UTF-8") from None


def _parse(body: bytes) -> tuple[_Members, Any, bytes]:
    """Return the members and the parameters, and the text of these if the answer is strict JSON.

    Raises:
        BadPrefillAnswerError: It is no JSON object.
    """
    try:
        read = _decode_members(body)
        text = bytes(read.kv_transfer_params)
        return read, decode(text) if text else None, text
    except (ValueError, RecursionError):
        message = _parse_leniently(body)
    params = message.pop("kv_transfer_params", None)
    names = _Members.__struct_fields__
    return _Members(**{name: message[name] for name in names if name in message}), params, b""


def _parse_leniently(body: bytes) -> dict[str, Any]:
    try:
        message = decode(body)
    except (ValueError, RecursionError):
        raise BadPrefillAnswerError("the prefill answer is not JSON") from None
    if not isinstance(message, dict):
        raise BadPrefillAnswerError("the prefill answer is not a JSON object")
    return message


# Requests that no engine's context can hold, refused before a prefill is spent on them.
#
# The prefill leg asks for one token, so an answer that is too long would be found out by the
# decode rank, with the KV cache already on a prefiller. Of a prompt of token ids that is known
# before, of a text once a prefiller has counted it. The proxy refuses only certain cases, in the
# words of vLLM 0.32 (`TokenizeParams`); the engines judge all other ones.


def refuse_if_too_long(api: Api, body: RequestBody, max_model_len: int) -> None:
    """Refuse a request whose answer, prompt of token ids, or both together exceed the context.

    Args:
        api: The endpoint; of agents' requests only the limit is judged, and no prompt of token ids.
        body: The client's.
        max_model_len: A context that no engine exceeds.

    Raises:
        BodyError: They do.
    """
    if api not in LIMIT_MEMBER:
        return
    values = body.values
    name, limit = _limit(api, body)
    if limit is not None and limit > max_model_len:
        raise BodyError(
            f"{name}={limit} cannot be greater than max_model_len={max_model_len}. "
            f"Please request fewer output tokens. (parameter={name}, value={limit})",
            name,
        )
    if api is not COMPLETIONS or values.get("truncate_prompt_tokens") is not None:
        return
    prompt = body.summary("prompt")
    if prompt.integers == prompt.elements > max_model_len:
        least = "at least " if prompt.elements == max_model_len + 1 else ""
        raise BodyError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {least}{prompt.elements} input tokens, which exceeds this limit even without "
            "any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={prompt.elements})",
            "input_tokens",
        )
    if limit is not None and prompt.integers == prompt.elements > max_model_len - limit:
        raise _too_long(prompt.elements, limit, max_model_len)


def refuse_what_was_counted(
    api: Api, body: RequestBody, prompt_tokens: int, max_model_len: int
) -> None:
    """Refuse a request whose prompt and answer exceed the context together, once they are counted.

    Args:
        api: The endpoint; only chats and completions are judged.
        body: The client's.
        prompt_tokens: Of the prompt, as an engine counted them.
        max_model_len: A context that no engine exceeds.

    Raises:
        BodyError: They do. What only an engine knows is left to it: it cuts a prompt, and judges images
            by their places in the text and not by the tokens that they become.
    """
    if api not in (CHAT, COMPLETIONS):
        return
    refuse_if_too_long(api, body, max_model_len)  # The context may not have been known before.
    _, limit = _limit(api, body)
    if limit is None or limit < 1 or prompt_tokens + limit <= max_model_len:
        return
    if body.values.get("truncate_prompt_tokens") is None and _is_text(api, body):
        # An engine's tokeniser reads no further than to the first token too many.
        raise _too_long(max_model_len - limit + 1, limit, max_model_len)


def _limit(api: Api, body: RequestBody) -> tuple[str, int | None]:
    """Return the member that limits the answer, and the limit that it is taken for."""
    name = LIMIT_MEMBER[api]
    if api is CHAT and body.values.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    limit = integer(body.values.get(name))
    # vLLM makes a chat of a message, with both limits.
    return ("max_completion_tokens" if api is MESSAGES else name), limit


def _is_text(api: Api, body: RequestBody) -> bool:
    """Return whether a prompt is nothing but text, or ids; to read all of it is expensive."""
    if api is COMPLETIONS:
        return True
    messages = body.large_values().get("messages")
    return isinstance(messages, list) and all(map(_says_text, messages))


def _says_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else message
    if not isinstance(content, list):
        return isinstance(content, str | None)
    return all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
        for part in content
    )


def _too_long(prompt_tokens: int, limit: int, max_model_len: int) -> BodyError:
    least = "at least " if prompt_tokens + limit == max_model_len + 1 else ""
    return BodyError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {limit} "
        f"output tokens and your prompt contains {least}{prompt_tokens} input tokens, for a total of "
        f"{least}{prompt_tokens + limit} tokens. Please reduce the length of the input prompt or the "
        f"number of requested output tokens. (parameter=input_tokens, value={prompt_tokens})",
        "input_tokens",
    )
