"""Requests that any single engine can answer: they go to a prefiller and back, as they are.

Prefillers, because a decode rank that is busy with them would hold up the whole fleet's step. Each
prefiller works on so many of them at a time; a bounded number of further ones wait here, in order of arrival.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.live.engines.engine_url import Fault, fault_of
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Target
from balanceroute.proxy.live.frontend.refusals import Tenancy
from balanceroute.proxy.live.openai.answer import (
    counts_of,
    headers_of_refusal,
    passable_headers,
    stream_headers,
)
from balanceroute.proxy.live.openai.errors import (
    JSON_HEADERS,
    NEVER_AGAIN,
    error_body,
    error_event,
    error_words,
    names_death,
    says_dead,
)
from balanceroute.proxy.live.openai.form_body import boundary_of
from balanceroute.proxy.live.request.failures import lacks_route
from balanceroute.proxy.live.request.shared import (
    MOST_DEATHS,
    REASON,
    SUSPECTED,
    EngineDied,
    LegFailed,
    LegSucceeded,
)
from balanceroute.proxy.live.scheduling.driver import Driver, RetryBudget
from balanceroute.proxy.live.telemetry.record import Log, Outcome, RequestRecord, Step, Trace
from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers, HttpRequest, WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.client import Call

# One request that one engine answers, and the way of its answer back to the client.
#
# A short answer is taken as a whole, so that another engine may give a better one. A long one, or
# a stream, is relayed as it comes, at the pace of its client; whatever breaks it off then is
# shown as a cut body. A failed request is tried on one other engine at most: it may be the
# request that fails.

# An answer that is longer is relayed as it comes.
_WHOLE_BYTES = 65_536
# Of a body whose answer has begun, and that is remembered as what may kill engines nevertheless.
_MOST_HASHED = 1 << 20
_BUSY = frozenset({429, 503})
# The engine has no such API, and the next one will not either.
_NOT_IMPLEMENTED = 501
# Headers that name a place.
_PLACES = frozenset({b"content-location", b"location"})


class SingleExchange:
    """One request and its answer; see `ResponseHandler`."""

    def __init__(
        self,
        owner: "PassThrough",
        request: HttpRequest,
        reply: Reply,
        headers: bytes,
        record: RequestRecord,
        *,
        among: frozenset[PrefillerId] | None = None,
    ) -> None:
        self.record = record
        self.among = among  # The only prefillers that can serve it; None for all.
        self._owner = owner
        self._request: HttpRequest | None = request
        self._reply = reply
        self._headers = headers
        self._prefiller: Prefiller | None = None
        self._call: Call | None = None
        self._tried = self._fresh = False
        self._fingerprint = b""
        # Of the answer; begun with each `send`.
        self._sent_s = 0.0
        self._status = self._bytes = 0
        self._answer_headers: Headers = []
        self._pieces: list[bytes] = []
        self._streams = False
        self._limit_s = owner.legs.prefill_timeout_s
        self._progress_s = owner.clock()
        self._timer = owner.call_later(self._limit_s, self._check_time)
        reply.on_closed = self.client_left

    @property
    def fingerprint(self) -> bytes:
        """Its name for `Suspects`; empty if engines compute nothing for it."""
        request = self._request
        if request is not None and request.body and not self._fingerprint:
            path, boundary = request.path.decode("latin-1"), boundary_of(request.headers)
            self._fingerprint = self._owner.suspects.of_bytes(path, request.body, boundary)
        return self._fingerprint

    @property
    def refused(self) -> bool:
        """Whether what it asks for may be what kills engines."""
        suspects = self._owner.suspects
        return bool(suspects.prompts) and suspects.refuses(self.fingerprint)

    def send(self, prefiller: Prefiller) -> None:
        assert self._request is not None
        request = self._request
        if self._owner.suspects.prompts:
            self._owner.suspects.sends(self.fingerprint, self)
        self._prefiller = prefiller
        self._status = self._bytes = 0
        self._pieces = []
        self._progress_s = self._sent_s = self._owner.clock()
        self.record.prefiller = prefiller.name
        if self.record.trace is not None:
            self._trace(self.record.trace, prefiller.name)
        target = request.path
        if request.query:
            target += b"?" + request.query
        self._call = prefiller.endpoint.request(
            # vLLM's GET routes refuse HEAD; the reply leaves the body out.
            b"GET" if request.method == b"HEAD" else request.method,
            target,
            self._headers,
            request.body,
            self,
            crashed=partial(self._owner.crashed, self),
            fresh=self._fresh,
        )

    def _trace(self, trace: Trace, engine: str) -> None:
        now_ns = round(self._progress_s * 1e9)
        if trace.steps:
            trace.steps[-1].fault = "failed"
        else:
            trace.steps.append(Step("queue", self.record.arrived_ns))
        trace.steps.append(Step("engine", now_ns, engine))

    def refuse(self, status: int, reason: str) -> None:
        """Refuse it before anything was done for it."""
        self._fail(status, reason, Outcome.REJECTED, retry_after=True)

    def refuse_suspect(self) -> None:
        self.record.refused_for = SUSPECTED
        self._fail(502, REASON, Outcome.REJECTED, for_good=True)

    def prompt_refused(self) -> None:
        """End it before another engine dies of it, unless its answer has begun."""
        if not self._reply.started:
            self._abort()
            self._give_up()

    def crash(self) -> None:
        self._abort()
        reason = "internal error; the proxy's log says more"
        self._fail(500, reason, Outcome.INTERNAL_ERROR)

    def engine_lost(self) -> None:
        """Go on elsewhere, unless the answer has begun: the engine is quarantined."""
        if not self._status and not (self._call is not None and self._call.lost):
            self._abort()
            self._mend(Fault.CONNECT, "the engine is quarantined")

    # What the engine answers: ResponseHandler.

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._answer_headers = headers
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        self._streams = kind.lower().startswith(b"text/event-stream")

    def on_data(self, data: bytes) -> None:
        self._progress_s = self._owner.clock()
        self._bytes += len(data)
        if self._bytes > self._owner.legs.answer_limit_bytes:
            self._abort()
            text = "the answer is too long"
            self.on_error(WireError(WireFault.TOO_LARGE, text, sent=True, answered=True))
        elif self._reply.started:
            if self._streams and b'"error"' in data and names_death(data.decode("latin-1")):
                self._died(said=True)
            self._reply.write(data)
        else:
            self._pieces.append(data)
            if self._streams or self._bytes > _WHOLE_BYTES:
                self._relay()

    def on_end(self) -> None:
        self._call = None
        status = self._status
        if self._reply.started:
            self._reply.end()
            self._answered("")
            return
        body = b"".join(self._pieces)
        dead = status >= 500 and says_dead(body)
        if dead:
            assert self._prefiller is not None
            self._died(said=True)
            # Before it is sent again: of an engine in quarantine that takes nothing from the retry budget.
            failed = LegFailed(self._prefiller.target, Fault.SERVER_ERROR, error_words(body), True)
            self._owner.report(failed)
        elsewhere = status in _BUSY or (status >= 500 and status != _NOT_IMPLEMENTED)
        if (elsewhere or lacks_route(status, body)) and self._again(Fault.SERVER_ERROR, lost=dead):
            return
        if status >= 500 and self._kills:
            self._mend(Fault.SERVER_ERROR, "")
            return
        self.record.status = status
        self.record.prompt_tokens, self.record.output_tokens = counts_of(body)
        passed = headers_of_refusal(status, self._answer_headers)
        self._reply.send(status, self._own_headers(passed), body)
        self._answered(error_words(body) if status >= 400 else "")

    def on_error(self, error: WireError) -> None:
        assert self._prefiller is not None
        self._call = None
        if error.kind is WireFault.STALE and not self._fresh and self._request is not None:
            self._fresh = True  # Such a request changes nothing in the engine.
            self.send(self._prefiller)
            return
        target, fault = self._prefiller.target, fault_of(error)
        if error.is_loss:
            self._died(said=False)
        self._mend(fault, f"the engine failed: {error}")
        # Afterwards: an engine that is quarantined loses all its requests.
        self._owner.report(LegFailed(target, fault, str(error)))

    def _relay(self) -> None:
        self.record.status = self._status
        self.record.stream = self._streams
        self.record.first_token_ns = round(self._progress_s * 1e9)
        self._limit_s = self._owner.legs.idle_stream_timeout_s
        self._timer.cancel()
        self._timer = self._owner.call_later(self._limit_s, self._check_time)
        if self._request is not None and len(self._request.body) <= _MOST_HASHED:
            self._fingerprint = self.fingerprint
        self._request = None  # Large, and not sent again.
        assert self._call is not None
        self._reply.on_pause = self._call.pause
        self._reply.on_resume = self._resume
        passed = (stream_headers if self._streams else passable_headers)(self._answer_headers)
        self._reply.start(self._status, self._own_headers(passed))
        self._reply.write(b"".join(self._pieces))
        self._pieces.clear()

    def _resume(self) -> None:
        self._progress_s = self._owner.clock()
        if self._call is not None:
            self._call.resume()

    # Ends.

    def _check_time(self) -> None:
        left_s = self._progress_s + self._limit_s - self._owner.clock()
        # A client that reads too slowly is the HTTP server's business.
        if self._reply.paused or left_s > 0:
            self._timer = self._owner.call_later(max(left_s, 1.0), self._check_time)
            return
        self._abort()
        if self._prefiller is None:
            self._fail(503, "no prefiller was free in time", Outcome.EXPIRED, retry_after=True)
            return
        reason = f"no answer within {self._limit_s:g} s"
        self._fail(504, reason, Outcome.UPSTREAM_ERROR)
        self._owner.report(LegFailed(self._prefiller.target, Fault.TIMEOUT, reason))

    def client_left(self) -> None:
        self._abort()
        self._end(Outcome.CANCELLED, "")

    def _died(self, *, said: bool) -> None:
        """Note that the engine died while it worked on this."""
        assert self._prefiller is not None
        if self.fingerprint:
            self._owner.suspects.died(
                EngineDied(
                    self.fingerprint,
                    self.record.request_id,
                    self._prefiller.target,
                    self._prefiller.target,
                    self._sent_s,
                    self._owner.clock(),
                    said=said,
                )
            )

    def _mend(self, fault: Fault, reason: str) -> None:
        if not self._reply.started and self._again(fault, lost=True):
            return
        if self._kills:
            self._give_up()
        else:
            self._fail(502, reason, Outcome.UPSTREAM_ERROR)

    def _give_up(self) -> None:
        """End it: it may be what kills engines."""
        self.record.refused_for = SUSPECTED
        self._fail(502, REASON, Outcome.UPSTREAM_ERROR, for_good=True)

    def _again(self, fault: Fault, *, lost: bool) -> bool:
        """Try one other engine, once; `lost` as in `PassThrough.again`."""
        if self._tried or self._request is None or self._kills:
            return False
        self._tried = True
        return self._owner.again(self, fault, lost=lost)

    @property
    def _kills(self) -> bool:
        """Whether as many engines have died of it as may."""
        suspects = self._owner.suspects
        return bool(suspects.prompts) and suspects.deaths(self.fingerprint) >= MOST_DEATHS

    def _answered(self, words: str) -> None:
        assert self._prefiller is not None
        status = self.record.status
        if status < 500:
            # A 5xx may be the request's own fault, and says nothing of other requests.
            self._owner.report(LegSucceeded(self._prefiller.target))
        if status < 400:
            self._end(Outcome.OK, "")
            return
        reason = f"the engine answered {status}" + (f": {words}" if words else "")
        client = status < 500 or status == _NOT_IMPLEMENTED
        self._end(Outcome.CLIENT_ERROR if client else Outcome.UPSTREAM_ERROR, reason)

    def _fail(
        self,
        status: int,
        reason: str,
        outcome: Outcome,
        *,
        retry_after: bool = False,
        for_good: bool = False,
    ) -> None:
        endpoint = self.record.endpoint
        if self._reply.started:
            if self._streams:
                self._reply.write(error_event(status, reason, endpoint=endpoint))
            self._reply.abort()
        else:
            self.record.status = status
            headers = [*JSON_HEADERS, (b"retry-after", b"1")] if retry_after else JSON_HEADERS
            if for_good:
                headers = [*JSON_HEADERS, NEVER_AGAIN]
            body = error_body(status, reason, endpoint=endpoint)
            self._reply.send(status, self._own_headers(headers), body)
        self._end(outcome, reason)

    def _abort(self) -> None:
        if self._call is not None:
            self._call.abort()
            self._call = None

    def _end(self, outcome: Outcome, reason: str) -> None:
        self._timer.cancel()
        if self._fingerprint and self._owner.suspects.prompts:
            self._owner.suspects.ended(self._fingerprint, self)
        self._request = None
        # The reply refers to this object: leave no cycle behind.
        self._reply.on_closed = self._reply.on_pause = self._reply.on_resume = None
        self._owner.ended(self, outcome, reason)

    def _own_headers(self, headers: Headers) -> Headers:
        request_id = (b"x-request-id", self.record.request_id.encode())
        if self._prefiller is not None:
            engine = self._prefiller.endpoint.name
            headers = [
                (name, _here(value, engine) if name in _PLACES else value)
                for name, value in headers
            ]
        return [*headers, request_id]


def _here(place: bytes, engine: str) -> bytes:
    """Return a URL below an engine's as one below the proxy's: its clients do not reach the engine."""
    authority = engine.partition("://")[2].encode()
    scheme, _, rest = place.partition(b"://")
    if scheme.lower() not in (b"http", b"https") or not rest.startswith(authority):
        return place
    rest = rest.removeprefix(authority)
    return place if rest and rest[0] not in b"/?#" else rest if rest[:1] == b"/" else b"/" + rest


@dataclass(frozen=True, slots=True)
class PassThroughLimits:
    """How many requests are taken."""

    per_prefiller: int  # Those that one prefiller works on at a time.
    waiting: int  # Those that wait for a prefiller, in the whole proxy.


class PassThrough:
    """Sends each request to the prefiller that works on the fewest.

    Args:
        intake: Refuses requests when it drains, and takes the reports on engines.
        retried: Called with every leg that is sent again, and why.
    """

    def __init__(
        self,
        instances: Instances,
        intake: Driver,
        *,
        tenancy: Tenancy,
        metrics: RequestMetrics,
        retried: Callable[[str, str], None],
        log: Log,
        limits: PassThroughLimits,
    ) -> None:
        self.clock = intake.context.clock
        self.call_later = intake.context.call_later
        self.legs = intake.context.legs
        self.suspects, self.report = intake.context.suspects, intake.report
        self._instances = instances
        self._intake = intake
        self._tenancy = tenancy
        self._metrics = metrics
        self._retried = retried
        self._log = log
        self._limits = limits
        self._retries = RetryBudget()
        self._waiting: dict[SingleExchange, None] = {}
        self._running: dict[SingleExchange, Prefiller] = {}
        self._busy: Counter[Prefiller] = Counter()
        self._turn = 0

    @property
    def in_flight(self) -> int:
        return len(self._running) + self.waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __call__(
        self,
        request: HttpRequest,
        reply: Reply,
        headers: bytes,
        record: RequestRecord,
        among: frozenset[PrefillerId] | None,
    ) -> None:
        """Answer one request that `Tenancy.refuse_alone` let in.

        `among` are the only prefillers that can; None for all.
        """
        self._retries.earn()
        exchange = SingleExchange(self, request, reply, headers, record, among=among)
        prefiller = self._free(None, among)
        if reply.closed:
            exchange.client_left()
        elif self._intake.draining:
            exchange.refuse(503, "the proxy is shutting down")
        elif exchange.refused:
            exchange.refuse_suspect()
        elif prefiller is not None:
            self._start(exchange, prefiller)
        elif not self._instances.up(among):
            exchange.refuse(503, "no prefiller is up")
        elif len(self._waiting) >= self._limits.waiting:
            exchange.refuse(429, f"{self._limits.waiting} requests wait for a prefiller already")
        else:
            self._waiting[exchange] = None

    def lost(self, target: Target) -> None:
        """Move what an engine that is quarantined has not begun to answer."""
        for exchange, prefiller in list(self._running.items()):
            if prefiller.target == target:
                exchange.engine_lost()

    # What an exchange does.

    def again(self, exchange: SingleExchange, fault: Fault, *, lost: bool) -> bool:
        """Send a request that failed to another prefiller; return whether there is one for it.

        Args:
            lost: Whether it was lost with its engine, if that is down. Errors may be common to all engines.
        """
        failed = self._running[exchange]
        other = self._free(failed, exchange.among)
        if other is None or other is failed:
            return False
        # A prefiller that fits no rank is up here.
        free = lost and failed not in self._instances.up()
        if not (free or self._retries.spend()):
            return False
        self._retried("single_engine", fault.value)
        exchange.record.retries += 1
        self._stop(exchange)
        self._start(exchange, other)
        return True

    def crashed(self, exchange: SingleExchange, error: Exception) -> None:
        """End a request whose handling failed: a 500, or a cut body, and nothing held."""
        isolation, record = self._intake.isolation, exchange.record
        isolation.failures.report("leg", error, request_id=record.request_id)
        if record.outcome is None:
            isolation.run("leg", exchange.crash)
        if exchange in self._running:
            self._stop(exchange)
        isolation.run("leg", self._begin_waiting)

    def ended(self, exchange: SingleExchange, outcome: Outcome, reason: str) -> None:
        """Note that a request is over, and begin the next one that waits."""
        record = exchange.record
        record.outcome, record.reason = outcome, reason
        record.ended_ns = round(self.clock() * 1e9)
        ran = exchange in self._running
        if ran:
            self._stop(exchange)
        else:
            self._waiting.pop(exchange, None)
        self._tenancy.ended_alone(record)
        self._metrics.passed_through(record)
        self._log.request_ended(record)
        if ran:
            self._begin_waiting()

    # Turns.

    def _begin_waiting(self) -> None:
        busy = set()
        for exchange in tuple(self._waiting):
            among = exchange.among
            if among in busy or exchange not in self._waiting:
                continue
            prefiller = self._free(None, among)
            if exchange.refused:
                exchange.refuse_suspect()
            elif prefiller is not None:
                del self._waiting[exchange]
                self._start(exchange, prefiller)
            elif not self._instances.up(among):
                exchange.refuse(503, "no prefiller is up")
            elif among is None:
                return  # No prefiller has room.
            else:
                busy.add(among)

    def _free(
        self, other_than: Prefiller | None, among: frozenset[PrefillerId] | None
    ) -> Prefiller | None:
        """Return the prefiller that works on the fewest; equal ones take turns."""
        free = [p for p in self._instances.up(among) if self._busy[p] < self._limits.per_prefiller]
        free = [p for p in free if p is not other_than] or free
        if not free:
            return None
        self._turn += 1
        first = self._turn % len(free)
        return min(free[first:] + free[:first], key=self._busy.__getitem__)

    def _start(self, exchange: SingleExchange, prefiller: Prefiller) -> None:
        self._running[exchange] = prefiller
        self._busy[prefiller] += 1
        exchange.send(prefiller)

    def _stop(self, exchange: SingleExchange) -> None:
        prefiller = self._running.pop(exchange)
        self._busy[prefiller] -= 1
        if not self._busy[prefiller]:
            del self._busy[prefiller]
