"""Instances that began, or came back, get a share of the requests that grows with their answers.

Such an instance is the emptiest, so every rule would send it all waiting requests. But it is cold: its
first steps compile kernels and capture graphs, and it may not work at all. So it has a **window**: the
number of requests that it may have without a first token. The first window is one request, and each first
token widens it by one, so that it doubles with every round of first tokens: a rank of 256 slots is full
after eight rounds. That takes a second where a first token takes 0.1 s, and as long as the engine needs
where its first one takes a minute. There is nothing to set: the instance's own pace decides.

A window counts only while another instance without one is open. So a fleet that begins as a whole serves
at its full rate at once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from balanceroute.proxy.core.events import (
    Action,
    DecodeLost,
    DecodeStarted,
    Event,
    Expire,
    FirstToken,
    PrefillDone,
    PrefillLost,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestRecomputed,
)

# The first ones widen the window of the request's instance; the second ones do not.
_PROOFS = (RequestFinished, PrefillDone, FirstToken, DecodeStarted)
_LOSSES = (DecodeLost, PrefillLost, RequestRecomputed, RequestFailed, RequestCancelled)


@dataclass(slots=True)
class _Window:
    width: int  # Requests without a first token that it may have.
    grows: bool  # Whether each first token widens it; else the first one ends it.
    waiting: set[RequestId] = field(default_factory=set)  # Those that it has.


class WarmUp:
    """The windows of the instances of one role, by their numbers."""

    def __init__(self) -> None:
        self.active = False  # Whether any instance has one.
        self._windows: dict[int, _Window] = {}
        self._at: dict[RequestId, int] = {}
        # Sent while the scheduler handles an event that `saw` does not know yet.
        self._just_sent: set[RequestId] = set()

    def begin(self, instance: int, *, grows: bool) -> None:
        """Give an instance a window of one request; `grows` as in `_Window`."""
        self.end(instance)
        self._windows[instance] = _Window(1, grows)
        self.active = True

    def end(self, instance: int) -> None:
        """Let an instance have its full share: it is warm, or closed."""
        window = self._windows.pop(instance, None)
        if window is not None:
            for request in window.waiting:
                del self._at[request]
            self.active = bool(self._windows)

    def room(self, instance: int) -> int | None:
        """Return how many more requests an instance may be sent now; None if it has no window."""
        window = self._windows.get(instance)
        return None if window is None else max(0, window.width - len(window.waiting))

    def width(self, instance: int) -> int | None:
        window = self._windows.get(instance)
        return None if window is None else window.width

    def binds(self, is_open: Sequence[bool]) -> bool:
        """Return whether windows count: an instance is open that has none."""
        return any(able and one not in self._windows for one, able in enumerate(is_open))

    @property
    def instances(self) -> Collection[int]:
        return self._windows.keys()

    def sent(self, instance: int, request: RequestId) -> None:
        self._gone(request)
        window = self._windows.get(instance)
        if window is not None:
            window.waiting.add(request)
            self._at[request] = instance
            self._just_sent.add(request)

    def saw(self, event: Event, actions: Sequence[Action], full: Sequence[int]) -> None:
        """Follow the requests on their way.

        The event of a loss may already have sent the request on. It says nothing of the next instance.

        Args:
            full: By instance, the width at which it is warm.
        """
        if isinstance(event, _PROOFS):
            # The driver infers the start of an answer that is not streamed, which proves nothing.
            inferred = isinstance(event, DecodeStarted) and not event.token_seen
            if not inferred and event.request not in self._just_sent:
                self._proved(event.request, full)
        elif isinstance(event, _LOSSES) and event.request not in self._just_sent:
            self._gone(event.request)
        self._just_sent.clear()
        for action in actions:
            if isinstance(action, Expire):
                self._gone(action.request)

    def _proved(self, request: RequestId, full: Sequence[int]) -> None:
        where = self._gone(request)
        if where is None:
            return
        window = self._windows[where]
        window.width += 1
        if not window.grows or window.width >= full[where]:
            self.end(where)

    def _gone(self, request: RequestId) -> int | None:
        where = self._at.pop(request, None)
        if where is not None:
            self._windows[where].waiting.discard(request)
        return where


# Which instances a request may go to, given those that have lost it.
#
# A request that an instance lost goes to another one, even if it has to wait there: a retry on a
# broken instance gains nothing. But it never waits for a closed instance. If no other one is
# open, losses are ignored, the earliest first: if both of two ranks lost it, it goes to the one
# that lost it earlier.

_Id = TypeVar("_Id", bound=int)


def with_loss(lost_on: tuple[_Id, ...], instance: _Id) -> tuple[_Id, ...]:
    """Return `lost_on`, the earliest loss first, with one more loss."""
    return (*(other for other in lost_on if other != instance), instance)


def allowed(is_open: Sequence[bool], lost_on: Sequence[int]) -> list[bool]:
    """Return for each instance whether the request may go there.

    Args:
        is_open: For each instance whether it takes new requests.
        lost_on: The instances that lost the request, the earliest loss first.
    """
    for ignored in range(len(lost_on)):
        left = list(is_open)
        for instance in lost_on[ignored:]:
            left[instance] = False
        if any(left):
            return left
    return list(is_open)
