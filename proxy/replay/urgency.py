"""The headers of a replayed request that say whose it is and how urgent."""

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from balanceroute.proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balanceroute.proxy.replay.workload import PlannedRequest
    from balanceroute.proxy.wire.messages import Headers

# RFC 9218: urgencies 0 to 7, of which 3 is the usual one.
_USUAL_URGENCY, _MOST_URGENCY = 3, 7
_MOST_DEADLINE_MS = 86_400_000


def check(requests: "Iterable[PlannedRequest]", keys: Mapping[str, str]) -> None:
    """Check that the headers of all requests can be written, given the tenants' keys.

    Raises:
        ConfigError: There are keys, but none of a tenant; or a class or a deadline has no header.
    """
    for request in requests:
        if keys and request.tenant not in keys:
            raise ConfigError(f"no key of the trace's tenant {request.tenant!r}")
        if not 0 <= _USUAL_URGENCY + request.level <= _MOST_URGENCY:
            least, most = -_USUAL_URGENCY, _MOST_URGENCY - _USUAL_URGENCY
            reason = f"the header Priority has classes from {least} to {most}"
            raise ConfigError(f"class {request.level} of the trace: {reason}")


def headers_of(
    request: "PlannedRequest", keys: Mapping[str, str], *, time_scale: float
) -> "Headers":
    """Return the headers of one request: its tenant's key, class, deadline and conversation, if any."""
    headers: Headers = []
    if keys:
        headers.append((b"authorization", b"Bearer " + keys[request.tenant].encode()))
    if request.level:
        headers.append((b"priority", b"u=%d" % (_USUAL_URGENCY + request.level)))
    if request.deadline_ns is not None:
        deadline_ms = max(1, round(request.deadline_ns / time_scale / 1e6))
        if deadline_ms <= _MOST_DEADLINE_MS:  # A longer one is none.
            headers.append((b"x-request-deadline-ms", b"%d" % deadline_ms))
    if request.session:
        # A trace's name may be any text.
        headers.append((b"x-session-id", quote(request.session).encode()))
    return headers
