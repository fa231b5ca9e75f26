"""Which requests a web page may have made: what a listener without a token must not obey.

A page of another site may send requests to loopback, and after its own name was made to resolve to
loopback (DNS rebinding) it may read the answers too. The browser tells: Host is the page's name, and
Origin, which browsers send with every POST and with requests to another site, is where it came from.
"""

import ipaddress
import re
from collections.abc import Collection

from balanceroute.proxy.wire.messages import Headers, Rejection, first_value

_PORT = re.compile(r":[0-9]*$")
# Brackets stand around an IPv6 address, and nowhere else.
_BRACKETED = re.compile(r"\[([0-9a-f:.]+)\]")


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own, which no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_loopback_in_url(host: str) -> bool:
    bracketed = _BRACKETED.fullmatch(host)
    if bracketed is None:
        return ":" not in host and is_loopback(host)
    return ":" in host and is_loopback(bracketed[1])


def check_host(headers: Headers, names: Collection[str]) -> Rejection | None:
    """Return why a request may be a foreign web page's, or None.

    Args:
        headers: The request's. Without Host it is HTTP/1.0, which no browser speaks.
        names: Accepted in Host, in lower case, beside loopback.
    """
    authority = first_value(headers, b"host")
    if authority is None:
        return None
    host = _PORT.sub("", authority.decode("latin-1").lower())
    if host not in names and not _is_loopback_in_url(host):
        return Rejection(
            403, f"without a token this listener is not called {host[:256]!r}: see --admin-name"
        )
    origins = [value for name, value in headers if name == b"origin"]
    if any(origin.partition(b"://")[2].lower() != authority.lower() for origin in origins):
        return Rejection(
            403, "without a token this listener takes no orders of another site's page"
        )
    return None
