"""What a prefiller answers."""

from typing import Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.body import is_deep, may_be_deep
from balanceroute.proxy.live.openai.json_value import decode

# No context is this long; a larger count is wrong, and would spoil the ledger of the loads.
_MAX_TOKENS = 1 << 30
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BadPrefillAnswerError(BalanceRouteError):
    """The answer is not one to a completion request."""


class PrefillAnswer(Struct, frozen=True):
    """The parts that matter.

    Attributes:
        prompt_tokens: The prompt's length, s_i.
        cached_tokens: Of these, found in the prefix cache; None if the engine does not say.
        complete: Whether the one token ended the answer, by a stop condition.
        kv_transfer_params: For the decoder, as returned; None if absent.
        params_text: The same as it was written; empty if the answer is no strict JSON.
    """

    prompt_tokens: int
    cached_tokens: int | None
    complete: bool
    kv_transfer_params: object
    params_text: bytes
    message: dict[str, Any]


def read_prefill_answer(body: bytes) -> PrefillAnswer:
    """Parse a prefiller's answer.

    Raises:
        BadPrefillAnswerError: It is no JSON object with choices and usage.
    """
    message, params_text = _parse(body)
    if not isinstance(message, dict):
        raise BadPrefillAnswerError("the prefill answer is not a JSON object")
    usage, choices = message.get("usage"), message.get("choices")
    if not isinstance(usage, dict):
        raise BadPrefillAnswerError("the prefill answer has no usage")
    tokens = usage.get("prompt_tokens")
    if type(tokens) is not int or not 1 <= tokens <= _MAX_TOKENS:
        raise BadPrefillAnswerError("the prefill answer has no usage.prompt_tokens")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadPrefillAnswerError("the prefill answer has no choices")
    params = message.get("kv_transfer_params")
    complete = choices[0].get("finish_reason") not in (None, "length")
    # Only what may be encoded again.
    if may_be_deep(body) and is_deep(message if complete else params):
        raise BadPrefillAnswerError("the prefill answer is nested too deeply")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return PrefillAnswer(
        prompt_tokens=tokens,
        cached_tokens=cached if type(cached) is int and 0 <= cached <= tokens else None,
        complete=complete,
        kv_transfer_params=params,
        params_text=params_text,
        message=message,
    )


def _parse(body: bytes) -> tuple[Any, bytes]:
    """Return the answer decoded, and the text of its parameters if it is strict JSON."""
    try:
        message = decode(body)
    except (ValueError, RecursionError):
        raise BadPrefillAnswerError("the prefill answer is not JSON") from None
    try:
        params = _decode_members(body).get("kv_transfer_params")
    except (msgspec.DecodeError, UnicodeDecodeError):
        params = None
    return message, b"" if params is None else bytes(params)
