"""What a prefiller answers."""

import json
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.body import BodyError, is_deep, may_be_deep, read_object

# No context is this long; a larger count is wrong, and would spoil the ledger of the loads.
_MAX_TOKENS = 1 << 30
# The ids of the blocks grow with the prompt.
_LONG_BYTES = 4_096


class BadPrefillAnswerError(BalanceRouteError):
    """The answer is not one to a completion request."""


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """The parts that matter.

    Attributes:
        prompt_tokens: The prompt's length, s_i.
        cached_tokens: Of these, found in the prefix cache; None if the engine does not say.
        complete: Whether the one token ended the answer, by a stop condition.
        kv_transfer_params: For the decoder, as returned; None if absent.
        params_text: The same as JSON, if the answer is long: else encoding them again is quicker.
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
    """Return the answer decoded, and the text of its parameters if it is long."""
    if len(body) >= _LONG_BYTES:
        try:
            message, places = read_object(body)
        except BodyError:
            pass  # Stricter than engines are: NaN, for example.
        else:
            _, begin, end = places.get("kv_transfer_params", (0, 0, 0))
            return message, body[begin:end]
    try:
        return json.loads(body), b""
    except (ValueError, RecursionError):
        raise BadPrefillAnswerError("the prefill answer is not JSON") from None
