"""Answers to the pages of other sites (CORS), as vLLM gives them by default.

A browser asks before it sends such a page's request (a preflight: OPTIONS), and shows the page an
answer only if the answer allows it. Credentials that the browser keeps are never allowed: API keys
come from the page itself.
"""

from collections.abc import Collection

from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.service import Admit
from balanceroute.proxy.wire.messages import (
    Application,
    Headers,
    HttpRequest,
    Rejection,
    Reply,
    first_value,
)

ANY = "*"
_METHODS = b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
_MAX_AGE_S = b"600"
# All, as credentials are never sent; and by name for browsers that take the star for a name.
_EXPOSED = (
    b"access-control-expose-headers",
    b"*, Metadata, Retry-After, X-BalanceRoute-Model, X-RateLimit-Limit-Requests, "
    b"X-RateLimit-Limit-Tokens, X-RateLimit-Remaining-Requests, X-RateLimit-Remaining-Tokens, "
    b"X-RateLimit-Reset-Requests, X-RateLimit-Reset-Tokens, X-Request-Id",
)


class Cors:
    """An application that other sites' pages may use.

    Args:
        origins: The sites, as browsers write them in Origin; with `*` all of them.
        application: Answers all but preflights.
        admit: Its judge of heads; preflights, which carry no key, are admitted.
    """

    def __init__(self, origins: Collection[str], application: Application, admit: Admit) -> None:
        self._origins = {origin.encode() for origin in origins}
        self._allows_all = ANY in origins
        self._application = application
        self._admit = admit

    def admit(self, head: RequestHead, peer: str) -> Rejection | None:
        return None if _is_preflight(head.method, head.headers) else self._admit(head, peer)

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        if not _is_preflight(request.method, request.headers):
            self._application(request, reply)
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        if not self._allows(first_value(request.headers, b"origin")):
            reply.send(400, headers, b"Disallowed CORS origin")
            return
        headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        asked = first_value(request.headers, b"access-control-request-headers")
        if asked is not None:
            headers.append((b"access-control-allow-headers", asked))
        reply.send(200, headers, b"OK")

    def fields(self, headers: Headers) -> Headers:
        """Return the headers of every answer, errors too, that let a page read it, to a request's."""
        origin = first_value(headers, b"origin")
        if not self._allows(origin):
            return []
        assert origin is not None
        if self._allows_all:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        return [(b"access-control-allow-origin", origin), _EXPOSED, (b"vary", b"Origin")]

    def _allows(self, origin: bytes | None) -> bool:
        return origin is not None and (self._allows_all or origin in self._origins)


def _is_preflight(method: bytes, headers: Headers) -> bool:
    return (
        method == b"OPTIONS"
        and first_value(headers, b"origin") is not None
        and first_value(headers, b"access-control-request-method") is not None
    )
