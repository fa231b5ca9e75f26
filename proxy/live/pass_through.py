"""Requests that any single engine can answer: they go to a prefiller and back, as they are.

Prefillers, because a decode rank that is busy with them would hold up the whole fleet's step.
"""

import asyncio
from typing import TYPE_CHECKING

from balanceroute.proxy.live.answer import passable_headers
from balanceroute.proxy.live.api_error import JSON_HEADERS, error_body
from balanceroute.proxy.live.buffered_leg import BufferedLeg
from balanceroute.proxy.live.instances import Instances, Status

if TYPE_CHECKING:
    from balanceroute.proxy.live.instances import Prefiller
    from balanceroute.proxy.live.leg_settings import LegSettings
    from balanceroute.proxy.wire.client import Call
    from balanceroute.proxy.wire.messages import Headers, Request, WireError
    from balanceroute.proxy.wire.server import Reply


class PassThrough:
    """Sends each request to the next prefiller that is up, and on to another if it does not answer.

    Args:
        instances: The engines.
        legs: Its prefill timeout bounds these requests too.

    Attributes:
        in_flight: Requests not answered yet.
    """

    def __init__(self, instances: Instances, legs: "LegSettings") -> None:
        self.in_flight = 0
        self._instances = instances
        self._legs = legs
        self._turn = 0

    def __call__(
        self, request: "Request", reply: "Reply", headers: "Headers", request_id: str
    ) -> None:
        """Answer one request."""
        _Exchange(self, request, reply, headers, request_id).send(tries=2)

    def next_prefiller(self, other_than: "Prefiller | None") -> "Prefiller | None":
        """Return the next prefiller that is up, in turn, another than the last if there is."""
        up = [p for p in self._instances.prefillers if p.status is Status.UP]
        up = [p for p in up if p is not other_than] or up
        if not up:
            return None
        self._turn += 1
        return up[self._turn % len(up)]

    @property
    def legs(self) -> "LegSettings":
        """The time limits."""
        return self._legs


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        owner: PassThrough,
        request: "Request",
        reply: "Reply",
        headers: "Headers",
        request_id: str,
    ) -> None:
        self._owner = owner
        self._request = request
        self._reply = reply
        self._headers = headers
        self._request_id = request_id.encode()
        self._prefiller: Prefiller | None = None
        self._call: Call | None = None
        self._tries = 0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, *, tries: int) -> None:
        """Send it to a prefiller, and to at most `tries - 1` more if it breaks off."""
        prefiller = self._prefiller = self._owner.next_prefiller(self._prefiller)
        if prefiller is None:
            headers = [*JSON_HEADERS, (b"retry-after", b"1")]
            self._answer(503, headers, error_body(503, "no prefiller is up"))
            return
        self._tries = tries - 1
        self._owner.in_flight += 1
        self._reply.on_closed = self._left
        self._timer = asyncio.get_running_loop().call_later(
            self._owner.legs.prefill_timeout_s, self._too_late
        )
        target = self._request.path
        if self._request.query:
            target += b"?" + self._request.query
        self._call = prefiller.endpoint.request(
            # vLLM's GET routes refuse HEAD; the reply leaves the body out.
            b"GET" if self._request.method == b"HEAD" else self._request.method,
            target,
            self._headers,
            self._request.body,
            BufferedLeg(self._answered, self._broken, max_bytes=self._owner.legs.answer_bytes),
        )

    def _left(self) -> None:
        assert self._call is not None
        self._call.abort()
        self._done()

    def _too_late(self) -> None:
        self._left()
        limit_s = self._owner.legs.prefill_timeout_s
        self._answer(504, JSON_HEADERS, error_body(504, f"no answer within {limit_s:g} s"))

    def _answered(self, status: int, headers: "Headers", body: bytes) -> None:
        self._done()
        self._answer(status, headers, body)

    def _broken(self, error: "WireError") -> None:
        self._done()
        if self._tries:
            self.send(tries=self._tries)
        else:
            self._answer(502, JSON_HEADERS, error_body(502, f"the engine failed: {error}"))

    def _done(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._owner.in_flight -= 1
        self._reply.on_closed = None

    def _answer(self, status: int, headers: "Headers", body: bytes) -> None:
        self._reply.send(
            status, [*passable_headers(headers), (b"x-request-id", self._request_id)], body
        )
