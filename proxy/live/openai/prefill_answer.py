"""What a prefiller answers."""

from typing import Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.answer import ABORT, CANCELLED
from balanceroute.proxy.live.openai.body import is_deep, may_be_deep
from balanceroute.proxy.live.openai.json_value import decode
from balanceroute.proxy.live.openai.shape import Api
from balanceroute.proxy.live.openai.usage import PromptUsage, token_count

# No context is this long; a larger count is wrong, and would spoil the ledger of the loads.
_MAX_TOKENS = 1 << 30
# Up to Python 3.11 each look at a member of an enumeration is a call.
_MESSAGES, _RESPONSES = Api.MESSAGES, Api.RESPONSES


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
    """The parts that matter.

    Attributes:
        prompt_tokens: The prompt's length, s_i.
        usage: What else the engine tells of it; None if it does not tell what was cached.
        aborted: Whether the engine gave the request up.
        complete: Whether the one token ended the answer, by a stop condition.
        kv_transfer_params: For the decoder, as returned; None if absent.
        params_text: The same as it was written; empty if the answer is no strict JSON.
        body: The answer.
    """

    prompt_tokens: int
    usage: PromptUsage | None
    aborted: bool
    complete: bool
    kv_transfer_params: object
    params_text: bytes
    body: bytes

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were found in the prefix cache; None if the engine does not say."""
        return None if self.usage is None else self.usage.cached_tokens

    @property
    def message(self) -> dict[str, Any]:
        """All of it, decoded."""
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
    if not body.isascii():  # What is not read yet is not looked at, and may be read.
        _check_text(body)
    read, params, params_text = _parse(body)
    usage = read.usage
    if usage is None and prompt_tokens is not None:
        usage = {"prompt_tokens": prompt_tokens}
    if not isinstance(usage, dict):
        raise BadPrefillAnswerError("the prefill answer has no usage")
    reason: object
    if api is _MESSAGES:
        tokens, cached = _count_message(usage)
        reason = _reason_of_message(read)
    elif api is _RESPONSES:
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
    told = None if cached is None else PromptUsage(cached, written)
    return rest + (cached or 0) + (written or 0), told


def _reason_of_message(read: _Members) -> str:
    """Return why a message ended, in the words of the chat API."""
    if not isinstance(read.content, list):
        raise BadPrefillAnswerError("the prefill answer has no content")
    if read.stop_reason is None:
        return ABORT  # It has no word for it.
    return "length" if read.stop_reason == "max_tokens" else "stop"


def _reason_of_response(read: _Members) -> str:
    """Return the same of a response."""
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
