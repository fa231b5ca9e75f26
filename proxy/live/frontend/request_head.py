"""The head of a client's request: identity, and what of it may reach an engine.

Engine requests are built from an allow-list, never by removing from what the client sent: rank
headers, proxies' own headers and cookies cannot pass by being forgotten.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b, sha256

import msgspec
from msgspec import Struct

from balanceroute.proxy.core.admission import Allowance
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.routes import JSON, Media, Route, find
from balanceroute.proxy.live.openai.shape import Api
from balanceroute.proxy.live.openai.urgency import (
    FIRST_TOKEN_DUE,
    Urgency,
    deadline_ms,
    read_level,
    unreadable_deadline,
)
from balanceroute.proxy.live.security import Secret, Tenant, digest_of, matches_any
from balanceroute.proxy.wire.http1.heads import RequestHead, encode_fields
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Rejection

NOT_FOUND = Rejection(404, "Not Found")
"""Of requests that are not served."""

# Visible ASCII that stands in JSON as it is.
_REQUEST_ID = re.compile(rb"[!#-\[\]-~]{1,128}")
_MOST_OF_AN_ID = 256
_JSON_TYPES = frozenset({b"", b"application/json", b"application/x-www-form-urlencoded"})
_NO_CODING = frozenset({b"", b"identity"})
_ID_DIGITS = 8
_MAX_USER_AGENT = 128
# Those of Anthropic choose what of its API a client speaks.
_PASSED = frozenset({b"user-agent", b"anthropic-version", b"anthropic-beta"})
# Trace context (https://www.w3.org/TR/trace-context/) lets one trace span client and engine.
_TRACE = frozenset({b"traceparent", b"tracestate"})
JSON_LINE = b"content-type: application/json\r\n"
# Answers are read here, for counts and errors, so no engine is to compress one.
_ENGINE_LINES = b"x-request-id: %b\r\naccept-encoding: identity\r\n"
_TOKENS = re.compile(rb"[1-9][0-9]{0,8}")
_OPEN_WEBSOCKETS = frozenset({b"GET", b"CONNECT"})
_KEYS = frozenset({b"api-key", b"authorization", b"x-api-key"})
_WITH_KEYS = _PASSED | _KEYS


class BadHintError(Exception):
    """X-Expected-Output-Tokens is given twice, or is no number of tokens."""

    def __str__(self) -> str:
        return "X-Expected-Output-Tokens must be a number from 1 to 999999999, given once"


def client_request_id(headers: Headers) -> tuple[str, str]:
    """Return the client's X-Request-Id, and, where that cannot be kept, what it gave instead.

    Either is empty if there is no such thing. What cannot be kept is for the log alone: something else
    than 1 to 128 visible characters, or two ids that differ.
    """
    given = dict.fromkeys(value for name, value in headers if name == b"x-request-id")
    if len(given) == 1:
        (value,) = given
        if _REQUEST_ID.fullmatch(value):
            return value.decode(), ""
    return "", b", ".join(given)[:_MOST_OF_AN_ID].decode("utf-8", "backslashreplace")


def expected_output_tokens(headers: Headers) -> int | None:
    """Return the client's X-Expected-Output-Tokens, or None if it gave none.

    Raises:
        BadHintError: It is given twice, or is no number of tokens.
    """
    values = [value for name, value in headers if name == b"x-expected-output-tokens"]
    if not values:
        return None
    if len(values) > 1 or not _TOKENS.fullmatch(values[0]):
        raise BadHintError
    return int(values[0])


def given_keys(headers: Headers) -> list[bytes]:
    """Return the keys that are given: as the bearer token, Anthropic's X-Api-Key and Azure's Api-Key.

    Each of them may be given once: else none of them is a key.
    """
    given = [(name, value) for name, value in headers if name in _KEYS]
    if len({name for name, _ in given}) < len(given):
        return [b""]
    return [_token(name, value) for name, value in given]


def _token(name: bytes, value: bytes) -> bytes:
    """Return the key in a header; empty, which is no key, if the header holds something else."""
    if name != b"authorization":
        return value
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def api_key_id(headers: Headers) -> str:
    """Return what names the given API key in logs: the first 8 hexadecimal digits of its SHA-256.

    That is short enough to say nothing of a random key, and the same in every proxy and after every
    restart.
    """
    for name, value in headers:
        if name in _KEYS:
            return sha256(_token(name, value)).hexdigest()[:_ID_DIGITS]
    return ""


def user_agent(headers: Headers) -> str:
    """Return the client's own word of what it is, cut for a log."""
    for name, value in headers:
        if name == b"user-agent":
            return value[:_MAX_USER_AGENT].decode("latin-1")
    return ""


def asks_for_websocket(method: bytes, headers: Headers) -> bool:
    """Return whether a head opens a WebSocket (RFC 6455 section 4.1, over HTTP/3 RFC 9220)."""
    if method not in _OPEN_WEBSOCKETS:
        return False
    named = b",".join(value for name, value in headers if name == b"upgrade").lower()
    return b"websocket" in {protocol.strip() for protocol in named.split(b",")}


def check_json_body(headers: Headers) -> Rejection | None:
    """Return why a body so described is not read as JSON, or None.

    A body without a media type is, and so is a form, which is what curl calls a body without a
    media type.
    """
    for name, value in headers:
        if name == b"content-type":
            media_type = value.partition(b";")[0].strip().lower()
            if media_type not in _JSON_TYPES:
                return Rejection(415, "the Content-Type must be application/json")
        elif name == b"content-encoding" and value.lower() not in _NO_CODING:
            text = "the body must not be encoded: Content-Encoding is not served"
            return Rejection(415, text, ((b"accept-encoding", b"identity"),))
    return None


def engine_lines(request_id: str, *more: bytes, kind: bytes = JSON_LINE) -> bytes:
    """Return the header lines of every engine leg.

    Args:
        request_id: Names the request at the engine; vLLM makes the response's id of it.
        more: The lines of the other headers.
        kind: That of what the body is.
    """
    return b"".join((kind, _ENGINE_LINES % request_id.encode(), *more))


def key_headers(engine_key: Secret | None) -> Headers:
    return [] if engine_key is None else [(b"authorization", b"Bearer " + engine_key.value)]


def passed_headers(headers: Sequence[tuple[bytes, bytes]], *, keep_key: bool) -> Headers:
    """Return the client's headers that are for engines, without those of a trace."""
    passed = _WITH_KEYS if keep_key else _PASSED
    return [field for field in headers if field[0] in passed]


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    return [field for field in headers if field[0] in _TRACE]


# The tenant of a client by the keys that it gives, and what it may ask for.

EVERYBODY = Tenant("")
"""The tenant of all clients where the settings name none."""

KEY_IS_GONE = (401, "Unauthorized")
"""For a request whose key was withdrawn before its body had come."""

_NS_PER_MS = 1_000_000
_MS_PER_S = 1_000


class Clients:
    """Finds the tenant of a request.

    Args:
        api_keys: Keys that are no tenant's own.
        tenants: Empty if there are none; then all clients with one of the keys are `everybody`.
    """

    def __init__(
        self,
        api_keys: Sequence[Secret],
        tenants: Iterable[Tenant] = (),
        *,
        everybody: Tenant = EVERYBODY,
    ) -> None:
        tenants = tuple(tenants)
        self.has_keys = bool(api_keys or tenants)
        self._api_keys = api_keys
        self._owners = {digest: one for one in tenants for digest in one.digests}
        self._default = next((one for one in tenants if one.default), None)
        if not tenants:
            self._default = everybody

    def find(self, headers: Headers) -> Tenant | None:
        """Return the tenant of a request with these headers; None if it must not be served.

        A key may be given as the bearer token, as Anthropic's X-Api-Key and as Azure's Api-Key, each
        once; those that are given must be of one tenant.
        """
        if not self.has_keys:
            return self._default
        given = given_keys(headers)
        if not given:
            return None if self._api_keys else self._default
        found, *rest = [self._owner(key) for key in given]
        return found if all(one is found for one in rest) else None

    def _owner(self, key: bytes) -> Tenant | None:
        if self._owners:
            owner = self._owners.get(digest_of(key))
            if owner is not None:
                return owner
        return self._default if matches_any(self._api_keys, key) else None


def refuse_model(tenant: Tenant, model: str) -> tuple[int, str] | None:
    """Return the status and the reason, in OpenAI's words, if a tenant may not use a model."""
    if not tenant.models or model in tenant.models:
        return None
    if not model:
        return 400, "you must provide a model parameter"
    return 404, f"The model `{model[:128]}` does not exist or you do not have access to it."


def refuse_route(tenant: Tenant | None, route: Route, model: str) -> tuple[int, str] | None:
    """Return the status and the reason if a tenant may not have one engine answer a request."""
    if tenant is None:
        return KEY_IS_GONE
    if not tenant.models or route.media is Media.NONE:
        return None
    if route.media is Media.FORM:
        return 403, "the tenant's models cannot be told from others in a form"
    return refuse_model(tenant, model)


def urgency_of(
    tenant: Tenant, api: Api, headers: Headers, body: RequestBody, arrived_ns: int
) -> Urgency:
    """Return how urgent a request is: by its own word where its tenant may, else by the tenant's.

    A deadline that cannot be read was refused with the head.
    """
    level, deadline_ns = tenant.level, None
    if tenant.client_priority:
        level += read_level(api, headers, body)
    if tenant.client_deadline and (ms := deadline_ms(headers, FIRST_TOKEN_DUE)) is not None:
        deadline_ns = arrived_ns + ms * _NS_PER_MS
    if deadline_ns is None and tenant.deadline_s is not None:
        deadline_ns = arrived_ns + round(tenant.deadline_s * 1e9)
    return Urgency(level, deadline_ns, tenant.weight)


def allowance_headers(allowances: Mapping[str, Allowance]) -> Headers:
    """Return the rest of a tenant's rates, in OpenAI's headers.

    Source: https://platform.openai.com/docs/guides/rate-limits, "Rate limits in headers".
    """
    headers: Headers = []
    for name, allowance in allowances.items():
        unit = name.encode()
        headers += [
            (b"x-ratelimit-limit-" + unit, b"%d" % allowance.limit),
            (b"x-ratelimit-remaining-" + unit, b"%d" % allowance.remaining),
            (b"x-ratelimit-reset-" + unit, duration(allowance.reset_ns)),
        ]
    return headers


def duration(time_ns: int) -> bytes:
    """Return a time as OpenAI writes it, which is as Go does: 12ms, 1s, 8.64s, 6m0s, 1h0m0s.

    In whole milliseconds, rounded up.
    """
    ms = -(-time_ns // _NS_PER_MS)
    if 0 < ms < _MS_PER_S:
        return b"%dms" % ms
    seconds, ms = divmod(ms, _MS_PER_S)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = b"%d" % seconds + ((b".%03d" % ms).rstrip(b"0") if ms else b"") + b"s"
    if hours:
        return b"%dh%dm" % (hours, minutes) + text
    return b"%dm" % minutes + text if minutes else text


# Which conversation a request belongs to, as its client names it: one rule for every client.
#
# | from | who sends it |
# | --- | --- |
# | `X-Session-Id` | anybody; OpenCode |
# | `X-Claude-Code-Session-Id`, with `X-Claude-Code-Agent-Id` of a subagent | Claude Code |
# | `X-Session-Affinity` | OpenCode |
# | `Thread-Id`, then `Session-Id`, then `session_id` | Codex; the last one its older versions |
# | the session in `metadata.user_id`, or in `user` | Claude Code; LiteLLM in front of it |
# | `session_id`, then `prompt_cache_key` | clients of vLLM; Codex and OpenAI's clients |
#
# The first that is there decides. Names are read by what the clients' own sources and pages say:
# code.claude.com/docs/en/llm-gateway-protocol; openai/codex,
# codex-rs/codex-api/src/requests/headers.rs and codex-rs/core/src/client.rs; opencode,
# packages/opencode/src/session/llm/request.ts. Threads of Codex and subagents of Claude Code
# share a session, but no prompt: each of them is a conversation.

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
_NAMING_MEMBERS = frozenset({"metadata", "prompt_cache_key", "session_id", "user"})
# How Claude Code wrote it before its user ids were JSON.
_SUFFIX = re.compile(r"_session_([0-9A-Za-z-]{1,128})")
_HASH_BYTES = 8


class _UserId(msgspec.Struct):
    session_id: str = ""


_decode_user_id = msgspec.json.Decoder(_UserId).decode


def named_in_head(headers: Headers) -> bytes:
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


def named_in_body(body: RequestBody) -> bytes:
    """Return the name in a request's body; empty if there is none."""
    if _NAMING_MEMBERS.isdisjoint(body.values):
        return b""
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


def _users(body: RequestBody) -> Iterator[str]:
    if _is_short(body, "metadata"):
        metadata = body.values["metadata"]
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        if isinstance(user, str):
            yield user
    yield _short_text(body, "user")


def _short_text(body: RequestBody, name: str) -> str:
    value = body.values[name] if _is_short(body, name) else None
    return value if isinstance(value, str) else ""


def _is_short(body: RequestBody, name: str) -> bool:
    """Return whether a member is there and as short as a name; a longer one is not decoded for it."""
    return 0 < len(body.value_text(name)) <= _MOST_BYTES


# Checks of the head of a request alone, made once for all that repeat it.
#
# Most clients repeat a head with every request of a connection, except for the length of the
# body. The kept result does not depend on that length, nor on limits or loads, which change.

UNAUTHORISED = Rejection(401, "Unauthorized", ((b"www-authenticate", b"Bearer"),))
# Headers that few requests have, and that are read for each of these.
_RARE = frozenset(
    {
        b"traceparent",
        b"tracestate",
        b"x-expected-output-tokens",
        b"x-request-id",
    }
)


class KnownHead(Struct, frozen=True):
    """One head."""

    clients: Clients  # Those that found its tenant: newer keys may say otherwise.
    route: Route | None  # None if there is none.
    # Why such a request is not served, whatever its body and the limits; None if it is.
    rejection: Rejection | None
    tenant: Tenant | None  # Whose it is; None for no tenant's.
    api_key_id: str  # See `RequestRecord`.
    user_agent: str
    session: bytes  # The conversation's name in it; empty if there is none.
    rare: frozenset[bytes]  # The headers it has of those that few requests have.
    # Of the headers that engines get, except for those of a trace and the engines' own key.
    lines: bytes


def know(head: RequestHead | HttpRequest, clients: Clients, *, keep_key: bool) -> KnownHead:
    headers = head.headers
    route = find(head.path)
    tenant = clients.find(headers) if route is not None and route.keyed else EVERYBODY
    return KnownHead(
        clients,
        route,
        NOT_FOUND if route is None else _refuse(head, route, tenant),
        tenant,
        api_key_id(headers) if clients.has_keys else "",
        user_agent(headers),
        named_in_head(headers),
        _RARE & {name for name, _ in headers},
        encode_fields(passed_headers(headers, keep_key=keep_key)),
    )


def _refuse(
    head: RequestHead | HttpRequest, route: Route, tenant: Tenant | None
) -> Rejection | None:
    if route.websocket and asks_for_websocket(head.method, head.headers):
        return Rejection(426, f"WebSockets are not served: {route.websocket}")
    if route.reason:
        return Rejection(404, f"Not Found: {route.reason}")
    if head.method not in route.methods:
        return Rejection(405, "Method Not Allowed", ((b"allow", route.allow),))
    if tenant is None:
        return UNAUTHORISED
    unreadable = unreadable_deadline(head.headers)
    if unreadable is not None:
        return Rejection(400, unreadable, param=unreadable.split(" ", 1)[0])
    return check_json_body(head.headers) if route.media is JSON else None
