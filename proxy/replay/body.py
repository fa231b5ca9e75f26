"""The body of a replayed request, which asks for a streamed answer."""

import json
from enum import Enum


class Api(Enum):
    """Which of the endpoints the requests go to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"

    @property
    def path(self) -> str:
        """Return the endpoint's path."""
        return "/v1/chat/completions" if self is Api.CHAT else f"/v1/{self.value}"


def request_body(
    api: Api,
    *,
    model: str,
    prompt: str,
    max_tokens: int | None,
    ignore_eos: bool,
    request_id: str | None = None,
) -> bytes:
    """Return the body of one request.

    Args:
        api: The endpoint.
        model: The model's name.
        prompt: The prompt, or the one message of the user.
        max_tokens: Limit of the answer; None for none.
        ignore_eos: vLLM's: the answer ends at `max_tokens` and nowhere else.
        request_id: vLLM's: names the request where a router replaces its `X-Request-Id`; None for none.
    """
    given: object = [{"role": "user", "content": prompt}]
    name, limit = "messages", "max_tokens"
    if api is Api.COMPLETIONS:
        name, given = "prompt", prompt
    elif api is Api.RESPONSES:
        name, given, limit = "input", prompt, "max_output_tokens"
    body: dict[str, object] = {"model": model, name: given}
    if max_tokens is not None:
        body[limit] = max_tokens
    body["temperature"] = 0
    # Messages have neither.
    if ignore_eos and api is not Api.MESSAGES:
        body["ignore_eos"] = True
    if request_id is not None and api is not Api.MESSAGES:
        body["request_id"] = request_id
    body["stream"] = True
    if api in (Api.CHAT, Api.COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body, separators=(",", ":")).encode()
