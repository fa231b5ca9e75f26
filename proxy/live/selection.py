"""Choices of engines for requests whose bytes another program moves: a gateway, or another router.

The scheduler, its admission rules, pool and leases are those of `serve`. A caller asks for the prefiller of
a request, says when its prefill has ended, asks for the rank, which may wait in the pool, and says how the
request ends. A missing call has a time limit: the end of a prefill --prefill-timeout-s, the call for a rank
--first-token-timeout-s, the end of an answer --answer-timeout-s; an engine that reports no request ends all that
its rank has. How far requests are follows from the engines' counters of output tokens, unless callers report it.

    selection = selector.select(Asked("id", prompt_tokens=900))   # or `open`, and a `Gateway` reads the body
    await selection.prefiller(); selection.prefilled(); await selection.rank()
    selection.began(); selection.ended()                          # or `failed`, `cancel`
"""

import asyncio
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TypeVar

from msgspec import Struct, structs

from balanceroute.proxy.core import events
from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.core.events import Eligible
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Target
from balanceroute.proxy.live.frontend.groups import Group, Groups, unknown_model
from balanceroute.proxy.live.frontend.refusals import Refusals
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.openai.urgency import Urgency
from balanceroute.proxy.live.request.phases import (
    DECODING,
    ENDED,
    POOLED,
    PREFILLING,
    STREAMING,
    Phase,
)
from balanceroute.proxy.live.request.session import NO_WORK, Attempt, Session, Work
from balanceroute.proxy.live.request.shared import KvHandle, LegSucceeded, PromptCounted, Report
from balanceroute.proxy.live.scheduling.driver import Arrival, Driver
from balanceroute.proxy.live.scheduling.scraped_loads import RankPaces
from balanceroute.proxy.live.telemetry.record import (
    DECODE_LEG,
    OK,
    PREFILL_LEG,
    Leg,
    Outcome,
    RequestRecord,
)
from balanceroute.proxy.wire.messages import Headers, bracketed

_Engine = TypeVar("_Engine")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
# A request counts as begun this long after its caller got its rank, unless it says more: until then its
# KV cache counts as the prefiller's, and its slot as taken.
_BEGINS_S = 0.5
# A request may be on its way for so long before its rank knows of it: a rank that is empty until then may
# have it yet.
_ON_ITS_WAY_S = 2.0
_MOST_REFUSALS = 1024
# No engine gets it.
_NO_BODY = b"{}"


class SelectionRefusedError(BalanceRouteError):
    """A request that gets no engine; it has the answer for its client."""

    def __init__(self, status: int, reason: str, headers: Headers, body: bytes) -> None:
        super().__init__(reason)
        self.status, self.headers, self.body = status, headers, body


class Selection:
    """One request, as its caller asks for and reports on it.

    In its session it stands where a client's `Reply` is, which here has refusals alone.

    Attributes:
        request_id: Names it among those that are not over.
        prefilled_before: Whether a prefiller has its KV cache already, of which nothing else is known.
        eligible: The only engines that may be chosen; None for all.
        claimed: Whether a caller has asked for its rank.
        refusal: Why it gets no engine any more; None while it may.
        waiting: Callers that wait for a choice now.
        begins_by_itself: Whether it counts as begun soon after its caller got its rank, without a call.
    """

    def __init__(
        self,
        request_id: str,
        over: "Callable[[Selection], None]",
        *,
        prefilled: bool = False,
        eligible: Eligible | None = None,
    ) -> None:
        self.request_id, self.prefilled_before, self.eligible = request_id, prefilled, eligible
        self.claimed = False
        self.refusal: SelectionRefusedError | None = None
        self.session: Reservation | None = None  # While it holds anything.
        loop = asyncio.get_running_loop()
        self._prefiller: asyncio.Future[Prefiller | None] = loop.create_future()
        self._rank: asyncio.Future[Rank] = loop.create_future()
        self._over: Callable[[Selection], None] | None = over
        self.waiting = 0
        self.begins_by_itself = True
        # What every `Reply` has.
        self.closed = self.started = self.commented = self.paused = False
        self.written = 0
        self.on_closed: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.more_headers: Headers = []

    # What its caller calls. A call that comes too late changes nothing, and returns False.

    async def prefiller(self) -> Prefiller | None:
        """Wait for its prefiller; None if its rank computes the prompt, or a prefiller has.

        Raises:
            SelectionRefusedError: It gets none.
        """
        return await self._wait(self._prefiller)

    async def rank(self) -> Rank:
        """Wait for its rank. If its prefill has not ended yet it has now.

        Raises:
            SelectionRefusedError: It gets none.
        """
        self.claimed = True
        self.prefilled()
        return await self._wait(self._rank)

    def prefilled(self, prompt_tokens: int | None = None) -> bool:
        """Note that its prefill has ended, of so many tokens if that is known: it waits for a rank."""
        return self._call(lambda session: session.prefill_ended(prompt_tokens))

    def prefill_answered(self) -> bool:
        """Note that the prefiller has answered, and that the caller that asks for the rank knows."""
        return self._call(lambda session: session.prefill_answered())

    def revise(self, max_tokens: int | None, expected_tokens: int | None) -> bool:
        """Note how long an answer may be, and is expected to be, unless its prefill has ended."""
        return self._call(lambda session: session.revised(max_tokens, expected_tokens))

    def began(self) -> bool:
        """Note that its rank has its KV cache, and makes tokens."""
        return self._call(lambda session: session.decode_began(seen=True))

    def emitted(self, tokens: int) -> bool:
        """Note that its rank has made so many tokens, of all sequences, in place of what counters say."""
        return self._call(lambda session: session.progressed(tokens))

    def ended(self, output_tokens: int | None = None) -> bool:
        """Note that its answer is complete, of so many tokens if that is known."""
        return self._call(lambda session: session.decode_ended(output_tokens))

    def failed(self, reason: str) -> bool:
        """Note that an engine failed it, or that its end is unknown."""
        return self._call(lambda session: session.went_wrong(reason))

    def cancel(self) -> bool:
        """Note that its client left."""
        return self._call(lambda session: session.client_gone())

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self._over is None

    def _call(self, what: "Callable[[Reservation], bool]") -> bool:
        session = self.session
        if session is None:
            return False
        try:
            return what(session)
        except Exception as error:
            session.host.crashed(session.number, self.request_id, "selection", error)
            return False

    async def _wait(self, choice: asyncio.Future[_Engine]) -> _Engine:
        self.waiting += 1
        try:
            return await asyncio.shield(choice)
        finally:
            self.waiting -= 1

    # What its session says.

    def choose(self, engine: Prefiller | Rank | None) -> None:
        """Set the engine of the next leg; None for no prefiller."""
        if isinstance(engine, Rank):
            self._rank.set_result(engine)
        if not self._prefiller.done():
            self._prefiller.set_result(engine if isinstance(engine, Prefiller) else None)

    def release(self) -> None:
        """Note that it is over: it holds nothing any more."""
        over, self._over, self.session, self.closed = self._over, None, None, True
        refusal = self.refusal or SelectionRefusedError(499, "the request is over", [], b"")
        for choice in (self._prefiller, self._rank):
            if not choice.done():
                choice.set_exception(refusal)
                choice.exception()  # No caller has to read it.
        if over is not None:
            over(self)

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        if self.closed:
            return
        reason = body.decode("utf-8", "replace")
        answer = [*headers, *self.more_headers]
        self.refusal = SelectionRefusedError(status, reason, answer, body)
        self.closed = True
        if self.session is None:  # Else it ends in a moment.
            self.release()

    def _never(self, *_answer: object) -> None:
        raise NotImplementedError("no client reads its answer here")

    start = comment = write = end = _never

    def release_body(self) -> None:
        """Do nothing: its caller has the body."""

    def abort(self) -> None:
        self.closed = True


class _Elsewhere(Attempt):
    """A leg that the caller has with an engine."""

    __slots__ = ("_paces", "_rank", "_since", "reported")

    def __init__(
        self, session: "Reservation", leg: Leg, engine: Prefiller | Rank, paces: RankPaces
    ) -> None:
        super().__init__(session, leg, engine)
        self.posted_s = session.context.clock()
        self.reported: int | None = None  # Tokens, if the caller reports them.
        self._paces = paces
        self._rank = engine if isinstance(engine, Rank) else None
        self._since: float | None = None  # What the rank had done when it began.

    @property
    def bound(self) -> bool:
        return self._rank is not None

    @property
    def tokens(self) -> int | None:
        if self._rank is None or self.reported is not None:
            return self.reported
        if self._since is None:
            return 0
        shape = self._session.shape
        rounds = max(0, int(self._paces.rounds(self._rank.id) - self._since))
        return min(rounds, shape.max_tokens or rounds) * shape.sequences

    @property
    def unseen_end(self) -> bool:
        """Whether its rank reports no request, for long enough to be believed."""
        if self._rank is None:
            return False
        empty_s = self._paces.empty_since_s(self._rank.id)
        return empty_s is not None and empty_s > self.posted_s + _ON_ITS_WAY_S

    def begin(self) -> None:
        """Note that the rank makes tokens from now on."""
        assert self._rank is not None, "a prefiller makes none"
        self._since = self._paces.rounds(self._rank.id)


class Reservation(Session):
    """The session of a selection: all is decided for it, and nothing sent."""

    __slots__ = ("_answered_s", "_began_s", "_paces", "_selection")

    def __init__(
        self,
        number: events.RequestId,
        host: Driver,
        *,
        ticket: events.Ticket,
        shape: Shape,
        body: RequestBody,
        headers: bytes,
        reply: Selection,
        record: RequestRecord,
    ) -> None:
        ticket = structs.replace(
            ticket,
            prefill=ticket.prefill and not reply.prefilled_before,
            eligible=_both(ticket.eligible, reply.eligible),
        )
        super().__init__(
            number,
            host,
            ticket=ticket,
            shape=structs.replace(shape, stream=True),
            body=body,
            headers=headers,
            reply=reply,
            record=record,
        )
        assert host.paces is not None, "the selector makes them"
        self._paces, self._selection = host.paces, reply
        self._began_s = 0.0
        self._answered_s: float | None = None  # When the prefiller did, if that was reported.
        reply.session = self

    @property
    def _leg(self) -> _Elsewhere:
        assert isinstance(self.work, _Elsewhere), f"an engine has it in {self.phase.name}"
        return self.work

    def _enter(self, phase: Phase, work: Work = NO_WORK) -> None:
        if phase is ENDED:
            self.record.output_tokens = self.record.output_tokens or self.work.tokens or 0
        super()._enter(phase, work)

    # What the driver says.

    def asks_itself(self, engine: Prefiller | Rank) -> bool:
        record, now_s = self.record, self.context.clock()
        if isinstance(engine, Prefiller):
            record.prefill_began(engine.name, now_s)
            self._enter(PREFILLING, _Elsewhere(self, PREFILL_LEG, engine, self._paces))
        else:
            record.bound(engine.name, now_s, pooled_s=self.pooled_s)
            self._enter(DECODING, _Elsewhere(self, DECODE_LEG, engine, self._paces))
        self._selection.choose(engine)
        return False

    def pooled(self) -> None:
        super().pooled()
        self._selection.choose(None)

    def check_deadline(self, now_s: float) -> None:
        legs, phase = self.context.legs, self.phase
        if phase is PREFILLING:
            answered_s = self._answered_s
            if now_s > self._leg.posted_s + legs.prefill_timeout_s:
                self.give_up(legs.overdue(prefill=True, stream=False))
            elif answered_s is not None and now_s > answered_s + legs.first_token_timeout_s:
                self._unclaimed()
        elif phase is POOLED or phase is DECODING:
            claimed = self._selection.claimed
            if not claimed and now_s > self.pooled_s + legs.first_token_timeout_s:
                self._unclaimed()
            elif claimed and phase is DECODING and self._begins(now_s):
                self.decode_began(seen=False)
        elif phase is STREAMING:
            if now_s > self._began_s + legs.answer_timeout_s:
                self.went_wrong(f"nobody ended it within {legs.answer_timeout_s:g} s")
            elif self._leg.unseen_end:
                self.decode_ended(None)

    def _begins(self, now_s: float) -> bool:
        by_itself = self._selection.begins_by_itself
        legs = self.context.legs
        return now_s > self._leg.posted_s + (_BEGINS_S if by_itself else legs.prefill_timeout_s)

    def _unclaimed(self) -> None:
        limit_s = self.context.legs.first_token_timeout_s
        self.give_up(f"nobody asked for its rank within {limit_s:g} s")

    def lease_ended(self, *, cheaper: bool) -> None:
        super().lease_ended(cheaper=cheaper)
        self._too_late("the lease of its KV cache ended before a rank was free")

    def drop_lost_kv(self) -> None:
        if self.phase is POOLED and self.kv is not None and self.kv.is_lost:
            self._too_late("its KV cache went with its prefiller")

    def instance_removed(self, target: Target, *, gently: bool = False) -> None:
        """End it if it must not stay; its caller is at the engine, and cannot be called back."""
        if self.phase is POOLED:
            self._too_late("its prefiller was removed")
        elif not gently:
            self.went_wrong("the engine was removed")

    def engine_lost(self, target: Target) -> None:
        """Do nothing: the caller is at the engine, sees it too, and ends."""

    def leave_rank(self, target: Target) -> None:
        """Do nothing, as with `engine_lost`."""

    def _too_late(self, reason: str) -> None:
        if self.phase is not ENDED:
            self.give_up(f"{reason}: prefill it again")

    def _end(self, event: events.Event | None, outcome: Outcome, reason: str = "") -> None:
        super()._end(event, outcome, reason)
        self._selection.release()

    # What the caller says; each returns whether it was in time.

    def prefill_ended(self, prompt_tokens: int | None) -> bool:
        if self.phase is not PREFILLING:
            return False
        prefiller, context, record = self._leg.engine, self.context, self.record
        assert isinstance(prefiller, Prefiller)
        tokens = prompt_tokens or self.ticket.prompt_tokens
        record.prefilled_ns = round(context.clock() * 1e9)
        lease_s = context.legs.lease_s
        # When the engine's answer came is unknown, as its caller may report it late, and a KV cache that is
        # pulled after its lease is another prompt's. So the lease counts from when the caller got the prefiller.
        lease_ns = None if lease_s is None else round((self._leg.posted_s + lease_s) * 1e9)
        implied: list[Report] = [LegSucceeded(prefiller.target)]
        if prompt_tokens is not None:
            record.prompt_tokens = prompt_tokens
            implied.append(PromptCounted(self.number, prompt_tokens))
        # What a rank needs to pull it, its caller knows.
        super().prefilled(KvHandle(prefiller, _NO_BODY))
        self.host.feed(events.PrefillDone(self.number, tokens, lease_ns), *implied)
        return True

    def prefill_answered(self) -> bool:
        if self.phase is not PREFILLING:
            return False
        self._answered_s = self.context.clock()
        return True

    def revised(self, max_tokens: int | None, expected_tokens: int | None) -> bool:
        if self.phase is not PREFILLING:
            return False
        self.shape = structs.replace(self.shape, max_tokens=max_tokens)
        self.record.max_tokens = max_tokens
        host = self.host
        assert isinstance(host, Driver)
        host.expect(
            self,
            structs.replace(self.ticket, max_tokens=max_tokens, expected_tokens=expected_tokens),
        )
        return True

    def decode_began(self, *, seen: bool) -> bool:
        if self.phase is not DECODING:
            return False
        now_s = self._began_s = self.context.clock()
        self._leg.begin()
        self._enter(STREAMING, self.work)
        self.kv = None
        implied: list[Report] = []
        if seen:
            self.record.first_token_ns = round(now_s * 1e9)
            implied.append(LegSucceeded(self._leg.engine.target))
        self.host.feed(events.DecodeStarted(self.number, token_seen=seen), *implied)
        return True

    def progressed(self, tokens: int) -> bool:
        if self.phase is DECODING:
            self.decode_began(seen=True)
        if self.phase is not STREAMING:
            return False
        shape = self.shape
        most = tokens if shape.max_tokens is None else shape.max_tokens * shape.sequences
        self._leg.reported = max(self._leg.reported or 0, min(tokens, most))
        self._began_s = self.context.clock()  # Of the time limit of an answer.
        return True

    def decode_ended(self, output_tokens: int | None) -> bool:
        if self.phase not in (DECODING, STREAMING):
            return self.client_gone()
        record = self.record
        record.status, record.output_tokens = 200, output_tokens or 0
        self._enter(ENDED)
        self._end(events.RequestFinished(self.number), OK)
        return True

    def went_wrong(self, reason: str) -> bool:
        if self.phase is ENDED:
            return False
        self._enter(ENDED)
        self._end(events.RequestFailed(self.number), Outcome.UPSTREAM_ERROR, reason)
        return True

    def client_gone(self) -> bool:
        alive = self.phase is not ENDED
        self.client_left()
        return alive


def _both(one: Eligible | None, other: Eligible | None) -> Eligible | None:
    if one is None or other is None:
        return one or other
    return Eligible(one.prefillers & other.prefillers, one.ranks & other.ranks)


# Takes requests, and finds them again.


class Asked(Struct, frozen=True):
    """A request whose caller keeps its body."""

    request_id: str  # 1 to 128 visible characters.
    prompt_tokens: int
    model: str = ""
    sequences: int = 1  # Answers to decode at a time.
    max_tokens: int | None = None  # Of one answer; None for no limit.
    expected_tokens: int | None = None  # What one answer is expected to have.
    prefilled: bool = False  # See `Selection`, as the next one.
    eligible: Eligible | None = None
    tenant: str = ""
    urgency: Urgency = Urgency()
    session: int = 0  # Names its conversation; see `Ticket`.
    blocks: tuple[int, ...] = ()  # Hashes of the prompt's blocks; see `Ticket`.
    block_tokens: float = 0.0
    # Of a caller that has read the body: what it asks for, in place of what it repeats above.
    shape: Shape | None = None
    body: RequestBody | None = None


class Selector:
    """Takes requests for all groups.

    Args:
        refusals: Counts and words refusals.
    """

    def __init__(self, groups: Groups, refusals: Refusals, unix_s: Callable[[], float]) -> None:
        self._groups, self._refusals, self._unix_s = groups, refusals, unix_s
        self._live: dict[str, Selection] = {}
        # Of those that ended while no caller waited, the latest.
        self._refused: dict[str, SelectionRefusedError] = {}
        self._follow()

    def _follow(self) -> None:
        """Have the counters of all ranks read from now on."""
        for group in self._groups:
            driver = group.intake
            if driver.paces is None:
                driver.paces = RankPaces(driver.instances, driver.context.clock)

    def __len__(self) -> int:
        return len(self._live)

    def open(
        self, request_id: str, *, prefilled: bool = False, eligible: Eligible | None = None
    ) -> Selection:
        """Return a selection without a session yet: a `Gateway` that makes `Reservation`s is to be given it.

        Raises:
            SelectionRefusedError: Its id is in use, or is none.
        """
        if not _REQUEST_ID.fullmatch(request_id):
            raise self._refusal(400, "the request id must have 1 to 128 visible characters")
        if request_id in self._live:
            raise self._refusal(409, "the request id is in use")
        self._follow()
        self._refused.pop(request_id, None)
        found = Selection(request_id, self._forget, prefilled=prefilled, eligible=eligible)
        self._live[request_id] = found
        return found

    def find(self, request_id: str) -> Selection | None:
        """Return the selection of an id; None if there is none.

        Raises:
            SelectionRefusedError: It ended lately, while no caller waited: its KV cache is not to be used.
        """
        found = self._live.get(request_id)
        if found is None and (refusal := self._refused.pop(request_id, None)) is not None:
            raise refusal
        return found

    def select(self, asked: Asked) -> Selection:
        """Take a request whose body stays with its caller; it may be refused at once, see `Selection`.

        Raises:
            SelectionRefusedError: Its id is in use, or is none.
        """
        found = self.open(asked.request_id, prefilled=asked.prefilled, eligible=asked.eligible)
        shape = asked.shape or Shape(
            *(Api.COMPLETIONS, asked.model, True, asked.sequences, ""),
            *(asked.prompt_tokens, 1, 0, asked.max_tokens),
        )
        clock = self._groups.context.clock
        record = RequestRecord(
            asked.request_id,
            shape.api.value,
            int(clock() * 1e9 + 0.5),
            self._unix_s(),
            model=shape.model[:128],
            stream=shape.stream,
            choices=shape.sequences,
            max_tokens=shape.max_tokens,
            tenant=asked.tenant,
        )
        group = self._groups.find(shape.model)
        if group is None:
            status, reason = unknown_model(shape.model)
            self._refusals.refuse(found, record, status, reason, param="model")
            return found
        record.group = group.name
        eligible = group.routes.eligible(shape.model) if group.routes.differ else None
        group.intake.submit(
            Arrival(
                *(shape, eligible, asked.expected_tokens, asked.urgency, asked.tenant),
                *(asked.session, False, shape.model in group.served.adapters),
                asked.body or RequestBody(_NO_BODY),
                lambda _: b"",
                found,
                record,
                partial(self._refusals.limit, found, record),
                make=Reservation,
                blocks=asked.blocks,
                block_tokens=asked.block_tokens,
            )
        )
        return found

    def eligible(self, endpoints: Collection[str]) -> Eligible:
        """Return the engines at some endpoints, as `endpoint_of` has them, or hosts; there may be none."""
        prefillers, ranks = set(), set()
        for engine in self._engines():
            place = endpoint_of(engine)
            if place in endpoints or place.rpartition(":")[0] in endpoints:
                if isinstance(engine, Prefiller):
                    prefillers.add(engine.id)
                else:
                    ranks.add(engine.id)
        return Eligible(frozenset(prefillers), frozenset(ranks))

    def loads(self) -> list[dict[str, object]]:
        """Return how busy each engine is, by its group's ledger: requests and KV tokens."""
        return [row for group in self._groups for row in _loads(group)]

    def _engines(self) -> Iterator[Prefiller | Rank]:
        for group in self._groups:
            yield from group.intake.instances.prefillers
            yield from group.intake.instances.ranks

    def _refusal(self, status: int, reason: str) -> SelectionRefusedError:
        found = Selection("", lambda _: None)
        now_ns = int(self._groups.context.clock() * 1e9)
        record = RequestRecord("", Api.COMPLETIONS.value, now_ns, self._unix_s())
        self._refusals.refuse(found, record, status, reason)
        assert found.refusal is not None
        return found.refusal

    def _forget(self, selection: Selection) -> None:
        del self._live[selection.request_id]
        refusal = selection.refusal
        if refusal is not None and not selection.waiting:
            self._refused[selection.request_id] = refusal
            if len(self._refused) > _MOST_REFUSALS:
                del self._refused[next(iter(self._refused))]


def endpoint_of(engine: Prefiller | Rank) -> str:
    """Return where an engine is, as `10.0.0.1:8000` or `[fd00::1]:8000`."""
    url = EngineUrl.parse(engine.target.url)
    return f"{bracketed(url.host)}:{url.port}"


def _loads(group: Group) -> Iterator[dict[str, object]]:
    driver = group.intake
    scheduler, instances = driver.scheduler, driver.instances
    ledger, prefillers = scheduler.ledger, scheduler.prefillers
    engines: list[Prefiller | Rank] = [*instances.prefillers, *instances.ranks]
    for engine in engines:
        if isinstance(engine, Prefiller):
            count, tokens = prefillers.prefills[engine.id], prefillers.held_tokens[engine.id]
        else:
            count, tokens = ledger.bound[engine.id], ledger.loads[engine.id]
        yield {
            "group": group.name,
            "role": engine.target.role.value,
            "engine": engine.name,
            "endpoint": endpoint_of(engine),
            "open": engine.open,
            "requests": int(count),
            "kv_tokens": int(tokens),
        }
