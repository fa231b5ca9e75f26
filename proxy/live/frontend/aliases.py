"""Names that stand for several models: which of them answers a request, and which ones in its place.

A proxy without aliases never imports this.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from math import inf
from typing import TYPE_CHECKING, cast

from balanceroute.proxy.live.frontend.groups import MODEL_HEADER, Asking, Group, Groups
from balanceroute.proxy.live.openai.shape import Shape
from balanceroute.proxy.live.request.shared import SessionContext
from balanceroute.proxy.live.security import Tenant
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.model_choice import ArrivalRate, GroupOutlook
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers, Late

if TYPE_CHECKING:
    import asyncio

    from balanceroute.proxy.live.settings.aliases import AliasConfig

_TASK = b"x-task"
_MOST_SHOWN = 64


class UnknownTaskError(Exception):
    """X-Task names no task of the alias, or is given twice."""


class Alias:
    """One alias."""

    def __init__(self, config: "AliasConfig", groups: Groups, clock: Callable[[], float]) -> None:
        self.config = config
        self._groups = groups
        self._clock = clock
        self._choice = config.make_choice()
        self._rate = ArrivalRate()
        self._places = {task: place for place, task in enumerate(config.tasks)}
        self._by_path = dict(config.paths)

    def answer(self, asking: Asking, submit: Callable[[Asking, Group], None]) -> None:
        """Give a request to one of its groups, or refuse it."""
        record = asking.record
        record.alias = self.config.name
        try:
            record.task = self.task(asking.headers, asking.tenant, record.endpoint)
        except UnknownTaskError as error:
            asking.deny(400, str(error))
            return
        groups = self.choose(record.task, asking.shape)
        if self.config.fall_back:
            begun = FallBack(asking, groups, self.config, submit, self._groups.context).begin()
        else:
            group = next(groups, None)
            begun = group is not None
            if group is not None:
                submit(asking.for_model(group.model), group)
        if not begun:
            asking.deny(503, f"no group of `{record.alias}` takes requests", retry_s=1)

    def task(self, headers: Headers, tenant: Tenant, path: str) -> str:
        """Return what a request asks for: by its word, its tenant, its path, or by default.

        Raises:
            UnknownTaskError: It asks for something else.
        """
        given = [value for name, value in headers if name == _TASK]
        if given:
            task = given[0].decode("latin-1")
            if len(given) == 1 and task in self._places:
                return task
            known = ", ".join(self.config.tasks)
            raise UnknownTaskError(
                f"X-Task is {task[:_MOST_SHOWN]!r}, must be given once and be one of {known}"
            )
        if tenant.task in self._places:
            return tenant.task
        return self._by_path.get(path, self.config.default_task)

    def choose(self, task: str, shape: Shape) -> Iterator[Group]:
        """Yield the group that is to answer, and then those that may in its place.

        Those of smaller models come first, as they have more room. A group that takes no requests when
        its turn comes is left out.
        """
        rate_per_s = self._rate.observe(1e3 * self._clock())
        found = [self._groups.get(name) for name in self.config.groups]
        outlooks = [self._outlook(one, shape) for one in found]
        if not any(one.healthy for one in outlooks):
            return
        chosen = self._choice.choose(self._places[task], rate_per_s, outlooks)
        first = found[chosen]
        assert first is not None, "it is healthy"
        yield first
        for place in (*range(chosen - 1, -1, -1), *range(chosen + 1, len(found))):
            # By now it may be gone, or another one.
            group = self._groups.get(self.config.groups[place])
            if group is not None and _takes(group):
                yield group

    def _outlook(self, group: Group | None, shape: Shape) -> GroupOutlook:
        if group is None or not _takes(group):
            return GroupOutlook(inf, healthy=False)
        targets = self.config.targets
        if targets is None or group.forecast is None:
            return GroupOutlook(0.0)
        return GroupOutlook(targets.share_used(*group.forecast(shape)))


def _takes(group: Group) -> bool:
    """Return whether a group takes requests for its model now."""
    routes, model = group.routes, group.model
    return group.intake.ready and routes.refuse(model, routes.eligible(model)) is None


def make_aliases(
    configs: "Iterable[AliasConfig]", groups: Groups, clock: Callable[[], float]
) -> Mapping[str, Alias]:
    return {one.name: Alias(one, groups, clock) for one in configs}


# Requests of an alias that go on to the next group while nothing of an answer has been sent.
#
# Each group gets an attempt of its own, with a record of its own. An attempt that is given up is
# over for its group before the next one begins, and nothing of it reaches the client, the log or a
# metric. So a client has one answer, and a request one line.

# What the deployment refuses a request for, and not its tenant: see `Refusal.cause`.
_OF_THE_GROUP = frozenset({"", "overload", "deadline"})


class FallBack:
    """Has one request answered by the first group that does.

    Args:
        groups: Those that may answer, best first.
    """

    def __init__(
        self,
        asking: Asking,
        groups: Iterator[Group],
        config: "AliasConfig",
        submit: Callable[[Asking, Group], None],
        context: SessionContext,
    ) -> None:
        self._asking = asking
        self._groups = groups
        self._config = config
        self._submit = submit
        self._context = context
        self._attempt: ModelAttempt | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        group = next(self._groups, None)
        if group is not None:
            self._try(group)
        return group is not None

    def failed(self, attempt: "ModelAttempt", status: int) -> bool:
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

    def _go_on(self, attempt: "ModelAttempt", why: str) -> bool:
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

    def _try(self, group: Group) -> None:
        asking = self._asking
        attempt = self._attempt = ModelAttempt(self, asking.reply, copy(asking.record))
        after_s = self._config.fall_back_after_s
        if after_s is not None and asking.record.stream:
            self._timer = self._context.call_later(after_s, self._late)
        # `attempt` has the attributes of a reply that the session reads.
        reply = cast("Reply", attempt)
        self._submit(asking.attempt(group.model, reply, attempt.record), group)

    def _late(self) -> None:
        self._timer = None
        if self._attempt is not None and not self._attempt.inner.started:
            self._go_on(self._attempt, "timeout")


class ModelAttempt:
    """The `Reply` that one group gets in place of the client's."""

    def __init__(self, chain: FallBack, inner: Reply, record: RequestRecord) -> None:
        self.inner = inner  # The client.
        self.record = record  # The attempt's own.
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
        return self._given_up or self.inner.closed

    @property
    def started(self) -> bool:
        return not self._given_up and self.inner.started

    @property
    def written(self) -> int:
        return self.inner.written

    @property
    def paused(self) -> bool:
        return not self._given_up and self.inner.paused

    @property
    def more_headers(self) -> Headers:
        return self.inner.more_headers

    @more_headers.setter
    def more_headers(self, headers: Headers) -> None:
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
        return self.inner.on_pause

    @on_pause.setter
    def on_pause(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_pause = call

    @property
    def on_resume(self) -> Callable[[], None] | None:
        return self.inner.on_resume

    @on_resume.setter
    def on_resume(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_resume = call

    def release_body(self) -> None:
        if not self._given_up:
            self.inner.release_body()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        if not self._given_up and not self._chain.failed(self, status):
            self._chain.over()
            self.inner.send(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        if not self._given_up:
            self._chain.over()
            self.inner.start(status, headers)

    @property
    def commented(self) -> bool:
        """Whether the client has the head of a stream, though the answer may still be any group's."""
        return self.inner.commented

    def comment(self, headers: Headers, data: bytes, late: Late) -> None:
        """See `Reply`; another group may still answer."""
        if not self._given_up:
            if not self.inner.commented:  # Which group answers is not known yet.
                more = self.inner.more_headers
                self.inner.more_headers = [one for one in more if one[0] != MODEL_HEADER]
            self.inner.comment(headers, data, late)

    def write(self, data: bytes) -> None:
        if not self._given_up:
            self.inner.write(data)

    def end(self) -> None:
        if not self._given_up:
            self.inner.end()

    def abort(self) -> None:
        if not self._given_up:
            self._chain.over()
            self.inner.abort()
