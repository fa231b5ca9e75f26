"""Requests of an alias that go on to the next group while nothing of an answer has been sent.

Each group gets an attempt of its own, with a record of its own. An attempt that is given up is over
for its group before the next one begins, and whatever comes of it reaches nobody: neither the client,
nor the log, nor a metric. So a client has one answer, and a request one line.
"""

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, cast

from balanceroute.proxy.live.frontend.asking import Asking

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.live.frontend.groups import Group
    from balanceroute.proxy.live.request.session_host import SessionContext
    from balanceroute.proxy.live.settings.aliases import AliasConfig
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.reply import Late

MODEL_HEADER = b"x-balanceroute-model"
"""Names the model that answers a request of an alias."""

# What the deployment refuses a request for, and not its tenant: see `Refusal.cause`.
_OF_THE_GROUP = frozenset({"", "overload", "deadline"})


class FallBack:
    """Has one request answered by the first group that does.

    Args:
        asking: The request, as its client sent it.
        groups: Who may answer, best first.
        config: The alias.
        submit: Gives a request to a group, or refuses it.
        context: The clock.
    """

    def __init__(
        self,
        asking: Asking,
        groups: "Iterator[Group]",
        config: "AliasConfig",
        submit: "Callable[[Asking, Group], None]",
        context: "SessionContext",
    ) -> None:
        self._asking = asking
        self._groups = groups
        self._config = config
        self._submit = submit
        self._context = context
        self._attempt: Attempt | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        """Ask the first group; return whether there is one."""
        group = next(self._groups, None)
        if group is not None:
            self._try(group)
        return group is not None

    def failed(self, attempt: "Attempt", status: int) -> bool:
        """Go on to the next group, if such an answer is a reason to and there is one."""
        why = str(status)
        if status == 504:
            why = "timeout"
        known = why in self._config.fall_back and attempt.record.refused_for in _OF_THE_GROUP
        return known and self._go_on(attempt, why)

    def over(self) -> None:
        """Stay with the attempt that answers now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_on(self, attempt: "Attempt", why: str) -> bool:
        group = None if attempt.inner.closed else next(self._groups, None)
        if group is None:
            return False
        self.over()
        attempt.give_up()
        record = self._asking.record
        record.fall_backs = (*record.fall_backs, (attempt.record.group, why))
        if attempt.inner.commented:
            record.status = 200  # Which its client has, whatever comes of it.
        self._try(group)
        return True

    def _try(self, group: "Group") -> None:
        asking = self._asking
        attempt = self._attempt = Attempt(self, asking.reply, copy(asking.record))
        after_s = self._config.fall_back_after_s
        if after_s is not None and asking.record.stream:
            self._timer = self._context.call_later(after_s, self._late)
        # What a reply tells of itself is read alone.
        reply = cast("Reply", attempt)
        self._submit(asking.attempt(group.model, reply, attempt.record), group)

    def _late(self) -> None:
        self._timer = None
        if self._attempt is not None and not self._attempt.inner.started:
            self._go_on(self._attempt, "timeout")


class Attempt:
    """What one group has for a client: see `Reply`.

    Attributes:
        inner: The client.
        record: The attempt's own.
    """

    def __init__(self, chain: FallBack, inner: "Reply", record: "RequestRecord") -> None:
        self.inner = inner
        self.record = record
        self._chain = chain
        self._given_up = False
        self._on_closed: Callable[[], None] | None = None

    def give_up(self) -> None:
        """End it for its group, as if its client had left, and let nothing more through."""
        self._given_up = self.record.superseded = True
        self.inner.on_pause = self.inner.on_resume = self.inner.on_closed = None
        left, self._on_closed = self._on_closed, None
        if left is not None:
            left()

    # What a group sees of the client.

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._given_up or self.inner.closed

    @property
    def started(self) -> bool:
        """Whether the head was sent."""
        return not self._given_up and self.inner.started

    @property
    def written(self) -> int:
        """Bytes that were sent."""
        return self.inner.written

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return not self._given_up and self.inner.paused

    @property
    def more_headers(self) -> "Headers":
        """Of the answer."""
        return self.inner.more_headers

    @more_headers.setter
    def more_headers(self, headers: "Headers") -> None:
        if not self._given_up:
            self.inner.more_headers = headers

    @property
    def on_closed(self) -> Callable[[], None] | None:
        """Called if the client leaves, and if the attempt is given up."""
        return self._on_closed

    @on_closed.setter
    def on_closed(self, call: Callable[[], None] | None) -> None:
        self._on_closed = call
        if not self._given_up:
            self.inner.on_closed = call

    @property
    def on_pause(self) -> Callable[[], None] | None:
        """See `Reply`."""
        return self.inner.on_pause

    @on_pause.setter
    def on_pause(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_pause = call

    @property
    def on_resume(self) -> Callable[[], None] | None:
        """See `Reply`."""
        return self.inner.on_resume

    @on_resume.setter
    def on_resume(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_resume = call

    def release_body(self) -> None:
        """See `Reply`."""
        if not self._given_up:
            self.inner.release_body()

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole answer, unless another group is to give one."""
        if not self._given_up and not self._chain.failed(self, status):
            self._chain.over()
            self.inner.send(status, headers, body)

    def start(self, status: int, headers: "Headers") -> None:
        """Begin a stream, which is this group's to its end."""
        if not self._given_up:
            self._chain.over()
            self.inner.start(status, headers)

    @property
    def commented(self) -> bool:
        """Whether the client has the head of a stream, though the answer may still be any group's."""
        return self.inner.commented

    def comment(self, headers: "Headers", data: bytes, late: "Late") -> None:
        """See `Reply`; another group may still answer."""
        if not self._given_up:
            if not self.inner.commented:  # Who answers is not said before it is known.
                told = self.inner.more_headers
                self.inner.more_headers = [one for one in told if one[0] != MODEL_HEADER]
            self.inner.comment(headers, data, late)

    def write(self, data: bytes) -> None:
        """See `Reply`."""
        if not self._given_up:
            self.inner.write(data)

    def end(self) -> None:
        """See `Reply`."""
        if not self._given_up:
            self.inner.end()

    def abort(self) -> None:
        """See `Reply`."""
        if not self._given_up:
            self._chain.over()
            self.inner.abort()
