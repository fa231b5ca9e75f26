"""The name of a conversation: which of those that clients send counts, and what is none."""

import json

import pytest

from balanceroute.proxy.live.frontend.request_head import named_in_body, named_in_head, session_of
from balanceroute.proxy.live.openai.body import RequestBody

CLAUDE = "x-claude-code-session-id"
UUID = "c31ac7cf-56a7-4c0a-b363-2b726377687d"


def body(**members: object) -> RequestBody:
    return RequestBody(json.dumps({"model": "tiny", **members}).encode())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([("x-session-id", "one")], b"one"),
        ([("x-session-id", "caf\u00e9 0")], b"caf\xc3\xa9 0"),
        # What Claude Code sends of its main thread, and of a subagent.
        ([("x-app", "cli"), (CLAUDE, UUID)], UUID.encode()),
        ([("x-claude-code-agent-id", "a7"), (CLAUDE, UUID)], UUID.encode() + b"\0a7"),
        ([("x-claude-code-agent-id", "a7")], b""),
        # OpenCode.
        ([("x-session-affinity", "ses_1"), ("x-session-id", "ses_1")], b"ses_1"),
        ([("x-session-affinity", "ses_1"), ("x-parent-session-id", "ses_0")], b"ses_1"),
        # Codex: two threads of one session have prompts of their own.
        ([("session-id", "s"), ("thread-id", "t")], b"t"),
        ([("session-id", "s")], b"s"),
        ([("session_id", "s"), ("conversation_id", "s")], b"s"),
        # The most explicit one, and the first of two.
        ([(CLAUDE, UUID), ("session-id", "s"), ("x-session-id", "own")], b"own"),
        ([("x-session-id", "first"), ("x-session-id", "second")], b"first"),
        # None.
        ([], b""),
        ([("x-request-id", "r"), ("x-session", "s"), ("session", "s")], b""),
        ([("x-session-id", ""), ("session-id", "s")], b"s"),
        ([("x-session-id", "x" * 1024)], b"x" * 1024),
        ([("x-session-id", "x" * 1025), ("session-id", "s")], b"s"),
    ],
)
def test_the_name_in_a_head(given: list[tuple[str, str]], name: bytes) -> None:
    assert named_in_head([(field.encode(), value.encode()) for field, value in given]) == name


OLD = f"user_{'ab' * 32}_account_{UUID}_session_{UUID}"
NEW = json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"metadata": {"user_id": OLD}}, UUID),
        ({"metadata": {"user_id": OLD.replace(f"account_{UUID}", "account_")}}, UUID),
        ({"metadata": {"user_id": NEW}}, UUID),
        ({"user": OLD}, UUID),
        ({"user": NEW, "prompt_cache_key": "key"}, UUID),
        ({"prompt_cache_key": "key", "metadata": {"user_id": "somebody"}, "user": "u"}, "key"),
        ({"prompt_cache_key": "\ud800"}, "\ud800"),
        ({"prompt_cache_key": "key", "session_id": "s"}, "s"),
        # A user has many conversations.
        ({"metadata": {"user_id": "somebody"}}, ""),
        ({"user": "user_session_"}, ""),
        ({"user": f"{OLD}/2"}, ""),
        ({"user": "_session_" + "a" * 129}, ""),
        # Whatever else a client may write there.
        ({"user": "{", "metadata": {"user_id": '{"session_id": 7}'}}, ""),
        ({"user": "{" * 900, "metadata": [OLD]}, ""),
        ({"user": '{"a":' * 150 + "1" + "}" * 150}, ""),
        ({"user": 7, "metadata": {"user_id": 7}, "prompt_cache_key": ["key"]}, ""),
        ({"user": None, "metadata": None, "prompt_cache_key": None}, ""),
        ({"prompt_cache_key": "x" * 1025}, ""),
        ({"metadata": {"user_id": OLD, "more": "x" * 1025}}, ""),
    ],
)
def test_the_name_in_a_body(members: dict[str, object], name: str) -> None:
    expected = name.encode("utf-8", "surrogatepass")
    assert named_in_body(body(**members)) == expected
    # Of a large body the members are decoded only when they are asked for.
    large = body(messages=[{"role": "user", "content": "x" * 200_000}], **members)
    assert named_in_body(large) == expected


def test_a_member_that_is_too_large_to_be_a_name_is_left_to_the_engine() -> None:
    large = body(prompt="a", metadata={"user_id": "x" * 200_000}, prompt_cache_key="y" * 200_000)
    assert named_in_body(large) == b""


def test_a_session_has_a_name_of_its_tenant_s() -> None:
    session = session_of(b"chat-1", "a")
    assert 0 < session < 2**63
    assert session == session_of(b"chat-1", "a")
    assert session not in {session_of(b"chat-1", "b"), session_of(b"c", "a")}
    assert session_of(b"", "a") == 0
