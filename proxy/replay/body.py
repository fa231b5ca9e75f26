"""The body of a replayed request, which asks for a streamed answer."""

import json
from enum import Enum


class Api(Enum):
    """Which of the OpenAI endpoints the requests go to."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        """Return the endpoint's path."""
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


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
    given: dict[str, object] = (
        {"messages": [{"role": "user", "content": prompt}]}
        if api is Api.CHAT
        else {"prompt": prompt}
    )
    body = {"model": model} | given
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    body["temperature"] = 0
    if ignore_eos:
        body["ignore_eos"] = True
    if request_id is not None:
        body["request_id"] = request_id
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body, separators=(",", ":")).encode()
