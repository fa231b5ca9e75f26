"""Requests to the gateway, what its errors look like, and files of keys."""

from pathlib import Path
from typing import Any

from tests.support.site import Exchanged

OWN = ("/health", "/ready", "/version", "/metrics", "/load")
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 4, "ignore_eos": True}
TALK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "t1 t2 t3"}],
    "max_tokens": 4,
    "ignore_eos": True,
}


def is_error(exchanged: Exchanged, status: int) -> str:
    """Check that an answer is an error in OpenAI's shape, and return its message."""
    assert exchanged.status == status, exchanged.body
    assert exchanged.header(b"content-type") == b"application/json"
    error = exchanged.json["error"]
    if "type" in exchanged.json:  # Anthropic's shape.
        assert exchanged.json.keys() == {"type", "error"}
        assert error.keys() == {"message", "type"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == status
    message = error["message"]
    assert isinstance(message, str)
    assert message
    return message


def keys(folder: Path, name: str, *words: str) -> str:
    path = folder / name
    path.write_text("".join(f"{word}\n" for word in words))
    path.chmod(0o600)
    return str(path)
