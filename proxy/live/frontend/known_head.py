"""What follows from the head of a request alone, which is worked out once for all that repeat it.

Most clients repeat a head with every request of a connection, except for the length of the body. What is
kept says nothing of that length, and nothing of limits or loads, which change.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from balanceroute.proxy.live.frontend.clients import EVERYBODY
from balanceroute.proxy.live.frontend.conversation import named_in_head
from balanceroute.proxy.live.frontend.request_head import (
    NOT_FOUND,
    api_key_id,
    asks_for_websocket,
    check_json_body,
    passed_headers,
    user_agent,
)
from balanceroute.proxy.live.openai.routes import Media, Route, find
from balanceroute.proxy.live.openai.urgency import unreadable_deadline
from balanceroute.proxy.wire.http1.heads import encode_fields
from balanceroute.proxy.wire.messages import Rejection

if TYPE_CHECKING:
    from balanceroute.proxy.live.frontend.clients import Clients
    from balanceroute.proxy.live.security.credentials import Tenant
    from balanceroute.proxy.wire.http1.heads import RequestHead
    from balanceroute.proxy.wire.messages import Request

_UNAUTHORISED = Rejection(401, "Unauthorized", ((b"www-authenticate", b"Bearer"),))
# Headers that few requests have, and that are read for each of these.
_RARE = frozenset(
    {
        b"traceparent",
        b"tracestate",
        b"x-expected-output-tokens",
        b"x-request-id",
    }
)
# Up to Python 3.11 each look at a member of an enumeration is a call.
_JSON = Media.JSON


class KnownHead(Struct, frozen=True):
    """One head.

    Attributes:
        clients: Who told whose it is: others say nothing of it.
        route: None if there is none.
        rejection: Why such a request is not served, whatever its body and the limits; None if it is.
        tenant: Whose it is; None if nobody's.
        api_key_id: See `RequestRecord`.
        session: The conversation's name in it; empty if there is none.
        rare: The headers it has of those that few requests have.
        lines: Of the headers that engines get, except for those of a trace and the engines' own key.
    """

    clients: "Clients"
    route: Route | None
    rejection: Rejection | None
    tenant: "Tenant | None"
    api_key_id: str
    user_agent: str
    session: bytes
    rare: frozenset[bytes]
    lines: bytes


def know(head: "RequestHead | Request", clients: "Clients", *, keep_key: bool) -> KnownHead:
    """Return what follows from a head.

    Args:
        head: The request, or its head.
        clients: Tell whose it is.
        keep_key: Whether the client's own key is for the engines.
    """
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
    head: "RequestHead | Request", route: Route, tenant: "Tenant | None"
) -> Rejection | None:
    if route.websocket and asks_for_websocket(head.method, head.headers):
        return Rejection(426, f"WebSockets are not served: {route.websocket}")
    if route.reason:
        return Rejection(404, f"Not Found: {route.reason}")
    if head.method not in route.methods:
        return Rejection(405, "Method Not Allowed", ((b"allow", route.allow),))
    if tenant is None:
        return _UNAUTHORISED
    unreadable = unreadable_deadline(head.headers)
    if unreadable is not None:
        return Rejection(400, unreadable, param=unreadable.split(" ", 1)[0])
    return check_json_body(head.headers) if route.media is _JSON else None
