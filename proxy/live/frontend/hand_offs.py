"""Decode engines' calls for a prefill: who may call, and who takes what they post.

The path is the secret that authorises a call.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.connectors.layerwise import METASERVER_PATH
from balanceroute.proxy.live.frontend.request_head import NOT_FOUND
from balanceroute.proxy.live.openai.api_error import JSON_HEADERS
from balanceroute.proxy.live.openai.body import is_deep
from balanceroute.proxy.wire.messages import Rejection

if TYPE_CHECKING:
    from balanceroute.proxy.live.frontend.groups import Groups
    from balanceroute.proxy.wire.http1.heads import RequestHead
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Request

# Ids and addresses of the blocks of one prompt.
_MOST_BYTES = 1 << 20
_BAD = Rejection(400, "the hand-off must be a JSON object of moderate depth")


class HandOffs:
    """Takes what decode ranks post."""

    def __init__(self, groups: "Groups") -> None:
        self._groups = groups

    def admit(self, head: "RequestHead") -> Rejection | None:
        """Return why a call is not taken, as far as its head tells."""
        if head.method != b"POST" or self._awaited(head.path) is None:
            return NOT_FOUND
        if head.content_length is None:
            return Rejection(411, "the hand-off needs a Content-Length")
        if head.content_length > _MOST_BYTES:
            return Rejection(413, f"the hand-off is over {_MOST_BYTES} bytes")
        return None

    def take(self, request: "Request", reply: "Reply") -> Rejection | None:
        """Take a call that was admitted, and answer it; or return why it is refused."""
        awaited = self._awaited(request.path)
        if awaited is None:  # It was given up while the body came.
            return NOT_FOUND
        try:
            params = json.loads(request.body)
        except (ValueError, RecursionError):
            params = None
        if not isinstance(params, dict) or is_deep(params):
            return _BAD
        awaited(params)
        reply.send(200, JSON_HEADERS, b"{}")
        return None

    def _awaited(self, path: bytes) -> Callable[[Mapping[str, Any]], None] | None:
        """Return who takes what a decode rank posts there."""
        transfer = path.removeprefix(METASERVER_PATH).decode("ascii", "replace")
        for group in self._groups:
            awaited = group.intake.context.hand_offs.get(transfer)
            if awaited is not None:
                return awaited
        return None
