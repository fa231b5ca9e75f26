"""What a prefiller answers."""

from typing import Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.answer import ABORT
from balanceroute.proxy.live.openai.body import is_deep, may_be_deep
from balanceroute.proxy.live.openai.json_value import decode

# No context is this long; a larger count is wrong, and would spoil the ledger of the loads.
_MAX_TOKENS = 1 << 30


class _Members(Struct):
    """The members of an answer that are read; the rest is decoded only if it is asked for."""

    usage: Any = None
    choices: Any = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_decode_members = msgspec.json.Decoder(_Members).decode


class BadPrefillAnswerError(BalanceRouteError):
    """The answer is not one to a completion request."""


class PrefillAnswer(Struct, frozen=True):
    """The parts that matter.

    Attributes:
        prompt_tokens: The prompt's length, s_i.
        cached_tokens: Of these, found in the prefix cache; None if the engine does not say.
        aborted: Whether the engine gave the request up.
        complete: Whether the one token ended the answer, by a stop condition.
        kv_transfer_params: For the decoder, as returned; None if absent.
        params_text: The same as it was written; empty if the answer is no strict JSON.
        body: The answer.
    """

    prompt_tokens: int
    cached_tokens: int | None
    aborted: bool
    complete: bool
    kv_transfer_params: object
    params_text: bytes
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        """All of it, decoded."""
        message: dict[str, Any] = decode(self.body)
        return message


def read_prefill_answer(body: bytes, prompt_tokens: int | None = None) -> PrefillAnswer:
    """Parse a prefiller's answer.

    Args:
        body: The answer.
        prompt_tokens: The prompt's length if that is known: the answers of vLLM's Rust frontend to
            token ids have no usage.

    Raises:
        BadPrefillAnswerError: It is no JSON object with choices and usage.
    """
    if not body.isascii():  # What is not read yet is not looked at, and may be read.
        _check_text(body)
    usage, choices, params, params_text = _parse(body)
    if usage is None and prompt_tokens is not None:
        usage = {"prompt_tokens": prompt_tokens}
    if not isinstance(usage, dict):
        raise BadPrefillAnswerError("the prefill answer has no usage")
    tokens = usage.get("prompt_tokens")
    if type(tokens) is not int or not 1 <= tokens <= _MAX_TOKENS:
        raise BadPrefillAnswerError("the prefill answer has no usage.prompt_tokens")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadPrefillAnswerError("the prefill answer has no choices")
    reason = choices[0].get("finish_reason")
    complete = reason not in (None, "length")
    # Only what may be encoded again.
    if may_be_deep(body) and is_deep(decode(body) if complete else params):
        raise BadPrefillAnswerError("the prefill answer is nested too deeply")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return PrefillAnswer(
        prompt_tokens=tokens,
        cached_tokens=cached if type(cached) is int and 0 <= cached <= tokens else None,
        aborted=reason == ABORT,
        complete=complete,
        kv_transfer_params=params,
        params_text=params_text,
        body=body,
    )


def _check_text(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError:
        raise BadPrefillAnswerError("the prefill answer is no UTF-8") from None


def _parse(body: bytes) -> tuple[Any, Any, Any, bytes]:
    """Return usage, choices and parameters, and the text of these if the answer is strict JSON.

    Raises:
        BadPrefillAnswerError: It is no JSON object.
    """
    try:
        read = _decode_members(body)
        text = bytes(read.kv_transfer_params)
        return read.usage, read.choices, decode(text) if text else None, text
    except (ValueError, RecursionError):
        message = _parse_leniently(body)
    params = message.get("kv_transfer_params")
    return message.get("usage"), message.get("choices"), params, b""


def _parse_leniently(body: bytes) -> dict[str, Any]:
    try:
        message = decode(body)
    except (ValueError, RecursionError):
        raise BadPrefillAnswerError("the prefill answer is not JSON") from None
    if not isinstance(message, dict):
        raise BadPrefillAnswerError("the prefill answer is not a JSON object")
    return message
