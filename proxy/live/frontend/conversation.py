"""Which conversation a request belongs to, as its client names it: one rule for every client.

| from | who sends it |
| --- | --- |
| `X-Session-Id` | anybody; OpenCode |
| `X-Claude-Code-Session-Id`, with `X-Claude-Code-Agent-Id` of a subagent | Claude Code |
| `X-Session-Affinity` | OpenCode |
| `Thread-Id`, then `Session-Id`, then `session_id` | Codex; the last one its older versions |
| the session in `metadata.user_id`, or in `user` | Claude Code; LiteLLM in front of it |
| `session_id`, then `prompt_cache_key` | clients of vLLM; Codex and OpenAI's clients |

The first that is there decides. Names are read by what the clients' own sources and pages say:
code.claude.com/docs/en/llm-gateway-protocol; openai/codex, codex-rs/codex-api/src/requests/headers.rs and
codex-rs/core/src/client.rs; opencode, packages/opencode/src/session/llm/request.ts. Threads of Codex and
subagents of Claude Code share a session, but no prompt: each of them is a conversation.
"""

import re
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.wire.messages import Headers

# A longer name is none.
_MOST_BYTES = 1_024
_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"thread-id",
    b"session-id",
    b"session_id",
)
_AGENT = b"x-claude-code-agent-id"
_CLAUDE_CODE = b"x-claude-code-session-id"
_NAMING = frozenset((*_HEADERS, _AGENT))
# How Claude Code wrote it before its user ids were JSON.
_SUFFIX = re.compile(r"_session_([0-9A-Za-z-]{1,128})")
_HASH_BYTES = 8


class _UserId(msgspec.Struct):
    session_id: str = ""


_decode_user_id = msgspec.json.Decoder(_UserId).decode


def named_in_head(headers: "Headers") -> bytes:
    """Return the name in a request's headers; empty if there is none. Of repeated ones the first counts."""
    given: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _NAMING and 0 < len(value) <= _MOST_BYTES:
            given.setdefault(name, value)
    for name in _HEADERS if given else ():
        if name in given:
            agent = given.get(_AGENT, b"") if name == _CLAUDE_CODE else b""
            # No header holds a NUL, so no two pairs are one name.
            return b"%b\0%b" % (given[name], agent) if agent else given[name]
    return b""


def named_in_body(body: "RequestBody") -> bytes:
    """Return the name in a request's body; empty if there is none."""
    for user in _users(body):
        found = _SUFFIX.search(user)
        if found is not None and found.end() == len(user):
            return found[1].encode()
        if user.startswith("{"):
            try:
                session = _decode_user_id(user).session_id
            except (msgspec.MsgspecError, RecursionError, ValueError):
                continue
            if session:
                return session.encode("utf-8", "surrogatepass")
    name = _short_text(body, "session_id") or _short_text(body, "prompt_cache_key")
    return name.encode("utf-8", "surrogatepass")


def session_of(name: bytes, tenant: str) -> int:
    """Return a hash of a conversation's name, below 2**63; 0 if it has none.

    Conversations of two tenants are two, whatever their names.
    """
    if not name:
        return 0
    digest = blake2b(name, digest_size=_HASH_BYTES, key=sha256(tenant.encode()).digest())
    return int.from_bytes(digest.digest()) >> 1 or 1


def _users(body: "RequestBody") -> "Iterator[str]":
    if _is_short(body, "metadata"):
        metadata = body.values["metadata"]
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        if isinstance(user, str):
            yield user
    yield _short_text(body, "user")


def _short_text(body: "RequestBody", name: str) -> str:
    value = body.values[name] if _is_short(body, name) else None
    return value if isinstance(value, str) else ""


def _is_short(body: "RequestBody", name: str) -> bool:
    """Return whether a member is there and as short as a name; a longer one is not decoded for it."""
    return 0 < len(body.value_text(name)) <= _MOST_BYTES
