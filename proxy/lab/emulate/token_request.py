"""Requests to /inference/v1/generate: token ids, and the limits in `sampling_params` (vLLM 0.32)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from balanceroute.proxy.lab.emulate.api_error import bad_request, invalid
from balanceroute.proxy.lab.emulate.request import GenerationRequest, TokenOutput, read_generation
from balanceroute.proxy.lab.emulate.settings import EmulationSettings

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
    room = settings.max_model_len - len(ids)
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
