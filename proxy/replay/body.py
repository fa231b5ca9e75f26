"""The body of a replayed request: a streamed answer of exactly the recorded number of tokens."""

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


def request_body(api: Api, *, model: str, prompt: str, output_tokens: int) -> bytes:
    """Return the body of one request.

    `ignore_eos` is vLLM's: with it the answer ends at `max_tokens` and nowhere else.

    Args:
        api: The endpoint.
        model: The model's name.
        prompt: The prompt, or the one message of the user.
        output_tokens: Length of the answer.
    """
    given: dict[str, object] = (
        {"messages": [{"role": "user", "content": prompt}]}
        if api is Api.CHAT
        else {"prompt": prompt}
    )
    body = {"model": model} | given
    body |= {
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()
