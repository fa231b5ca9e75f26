"""A session among a host, a client and engines that do what a test says: no sockets and no event loop."""

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from balanceroute.proxy.core import events
from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId, Ticket
from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Role, Target
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Api, read_shape
from balanceroute.proxy.live.request.continued import Continued
from balanceroute.proxy.live.request.decode_attempt import start_decode, start_prefill
from balanceroute.proxy.live.request.leg_settings import Direct
from balanceroute.proxy.live.request.phases import Phase
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import (
    EngineSeen,
    KvAbandoned,
    KvMissing,
    LegFailed,
    LegSucceeded,
    PromptCounted,
    PullFailed,
    RemotePrefillEnded,
    Report,
    SessionContext,
    SessionEnded,
    StreamLent,
    StreamReturned,
)
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.shared import Host, StallWatch
    from balanceroute.proxy.wire.http1.client import Endpoint, ResponseHandler
    from balanceroute.proxy.wire.http1.server import Reply

SSE = [(b"content-type", b"text/event-stream")]
DONE = b"data: [DONE]\n\n"
KV = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [1, 2],
    "remote_engine_id": "p0",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}
# Where a session is when the scheduler hears of it.
AFTER = {
    events.PrefillDone: {Phase.POOLED},
    events.PrefillLost: {Phase.QUEUED},
    events.DecodeLost: {Phase.POOLED},
    events.DecodeStarted: {Phase.STREAMING},
    events.FirstToken: {Phase.STREAMING, Phase.PREFILLING, Phase.ENDED},
    events.RequestRecomputed: {Phase.QUEUED, Phase.POOLED},
    events.RequestFinished: {Phase.ENDED},
    events.RequestFailed: {Phase.ENDED},
    events.RequestCancelled: {Phase.ENDED},
}


def token(text: str, **choice: object) -> bytes:
    """Return the event of one token."""
    members = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **choice}
    return b"data: " + json.dumps({"choices": [members]}, separators=(",", ":")).encode() + b"\n\n"


LAST = token("z", finish_reason="length")
HANDED_BACK = token("", finish_reason="stop", stop_reason="recomputed")


def prefill_answer(
    params: Mapping[str, object] | None = KV, *, finish_reason: str = "length"
) -> bytes:
    """Return a prefiller's answer."""
    return json.dumps(
        {
            "choices": [{"index": 0, "text": "a", "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
            "kv_transfer_params": params,
        }
    ).encode()


class Sent:
    """One request to an engine, which answers by hand."""

    def __init__(
        self,
        engine: str,
        headers: bytes,
        body: bytes,
        handler: Any,
        expires_s: float | None,
        *,
        fresh: bool,
    ) -> None:
        self.engine = engine
        self.fresh = fresh
        self.expires_s = expires_s
        self.headers = headers
        self.values = json.loads(body)
        self.handler: ResponseHandler = handler
        self.aborted = self.done = self.lost = self.paused = False

    def abort(self) -> None:
        if not self.done:
            self.aborted = self.done = True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def begin(self, *pieces: bytes) -> None:
        """Begin a stream."""
        self.handler.on_head(200, SSE)
        self.more(*pieces)

    def more(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.handler.on_data(piece)

    def end(self) -> None:
        self.done = True
        self.handler.on_end()

    def answer(self, status: int, body: bytes) -> None:
        """Answer at once and as a whole."""
        self.handler.on_head(status, [(b"content-type", b"application/json")])
        self.handler.on_data(body)
        self.end()

    def stream(self, *pieces: bytes) -> None:
        """Answer with a whole stream."""
        self.begin(*pieces)
        self.end()

    def break_off(self, kind: WireFault = WireFault.RESET, *, sent: bool = True) -> None:
        self.done = True
        self.handler.on_error(WireError(kind, "gone", sent=sent, answered=False))


class Engine:
    """An endpoint."""

    def __init__(self, name: str, sent: list[Sent]) -> None:
        self.name = name
        self.closed_idle = 0
        self._sent = sent

    def request(
        self,
        method: bytes,
        path: bytes,
        headers: bytes,
        body: bytes,
        handler: Any,
        *,
        expires_s: float | None = None,
        fresh: bool = False,
        **_: object,
    ) -> Sent:
        assert (method, path) == (b"POST", b"/v1/completions")
        self._sent.append(Sent(self.name, headers, body, handler, expires_s, fresh=fresh))
        return self._sent[-1]

    def close_idle(self) -> None:
        self.closed_idle += 1


class Client:
    """A reply."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.headers: Headers = []
        self.over = ""
        self.released = self.commented = self.closed = self.paused = False
        self.written = 0
        self.on_closed: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    def start(self, status: int, headers: Headers) -> None:
        assert not self.status, "a second head"
        self.status, self.headers = status, headers

    def write(self, data: bytes) -> None:
        self.body += data

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.body = body
        self.over = "sent"

    def end(self) -> None:
        self.over = "ended"

    def abort(self) -> None:
        self.over = "aborted"

    def release_body(self) -> None:
        self.released = True

    def leave(self) -> None:
        assert self.on_closed is not None
        self.on_closed()


class Timer:
    """One call for later."""

    def __init__(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.delay_s = delay_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def is_data(value: object) -> bool:
    """Return whether a value is the same in another process: it refers to nothing here."""
    return bool(pickle.loads(pickle.dumps(value)) == value)  # noqa: S301 - its own.


class Site:
    """The host of one session, with two prefillers and two ranks."""

    def __init__(
        self,
        *,
        connector: str = "nixl",
        stream: bool = True,
        budget: int = 100,
        members: Mapping[str, object] | None = None,
        **flags: object,
    ) -> None:
        flags = {"prefill": ["http://p"], "decode": ["http://d"], "count_tokens": "events"} | flags
        self.connector = make_connector(connector, callback="http://proxy")
        legs = make_config(None, flags).legs
        self.legs = replace(legs, lease_s=self.connector.facts.lease_s)
        self.now_s = 100.0
        # Since when what comes may have waited to be read; None for not at all.
        self.stalled_since_s: float | None = None
        self.suspended_s = 0.0
        self.budget = budget
        self.max_model_len: int | None = 131_072
        self.sent: list[Sent] = []  # What the engines were sent.
        self.fed: list[events.Event] = []  # What the scheduler was told.
        # What it answers at once to a kind of event, from within.
        self.replies: dict[type, Callable[[], object]] = {}
        # Which engines' health checks were told of a failure.
        self.blamed: list[tuple[str, Fault]] = []
        self.praised: list[str] = []
        # Which rank pulled from whom, and how that failed.
        self.pulls: list[tuple[str, str, Fault | None]] = []
        self.abandoned: list[str] = []
        self.timers: list[Timer] = []
        self.ended_requests = 0
        self.context = SessionContext(
            self.connector,
            self.legs,
            clock=lambda: self.now_s,
            uptime_s=lambda: self.now_s + self.suspended_s,
            call_later=cast("Any", self.call_later),
            unique=lambda: "1234",
            stalls=cast("StallWatch", self),
            observe_gap=self.observe_gap,
            max_model_len=lambda _: self.max_model_len,
            hand_offs={},
            resuming=Continued,
        )
        self.engines: dict[str, Engine] = {}
        self.prefillers = [
            Prefiller(PrefillerId(i), f"p{i}", Target(Role.PREFILL, f"p{i}"), self._engine(f"p{i}"))
            for i in range(2)
        ]
        self.ranks = [
            Rank(RankId(i), f"d{i}", Target(Role.DECODE, f"d{i}"), self._engine(f"d{i}"), header)
            for i, header in enumerate((None, b"1"))
        ]
        self.client = Client()
        self.session = self._session(stream=stream, members=members or {})

    def _engine(self, name: str) -> "Endpoint":
        self.engines[name] = Engine(name, self.sent)
        return cast("Endpoint", self.engines[name])

    def _session(self, *, stream: bool, members: Mapping[str, object]) -> Session:
        values = {"prompt": "a b", "max_tokens": 9, "stream": stream, **members}
        body = RequestBody(json.dumps(values).encode())
        shape = read_shape(Api.COMPLETIONS, body, max_sequences=8)
        decode = not (shape.direct and self.legs.direct is Direct.PREFILL)
        split = not shape.direct and not self.connector.decode_first
        session = Session(
            RequestId(3),
            cast("Host", self),
            ticket=Ticket(2, shape.sequences, split or not decode, decode),
            shape=shape,
            body=body,
            headers=b"x-request-id: r\r\n",
            reply=cast("Reply", self.client),
            record=RequestRecord("r", "/v1/completions", 0, 0.0),
        )
        if not session.ticket.prefill:
            session.pooled()
        return session

    # What the host does.

    def waiting_since_s(self) -> float:
        return self.now_s if self.stalled_since_s is None else self.stalled_since_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay_s, callback))
        return self.timers[-1]

    def crashed(self, _: RequestId, request_id: str, what: str, error: Exception) -> None:
        assert request_id == "r"
        assert what
        raise error

    def feed(self, event: events.Event, *implied: Report) -> None:
        for report in implied:
            self.report(report)
        """Check that the session is where it will be, and has let go of its engines."""
        assert is_data(event)
        assert self.session.phase in AFTER[type(event)], event
        assert self.in_flight == [] or self.session.phase is Phase.STREAMING
        self.fed.append(event)
        self.replies.get(type(event), lambda: None)()

    def choose_prefiller(self, number: RequestId, other_than: PrefillerId | None) -> Prefiller:
        assert is_data((number, other_than))
        chosen = next(one for one in self.prefillers if one.id != other_than)
        chosen.hand_offs += 1
        return chosen

    def group_of(self, engine: Prefiller | Rank) -> Target:
        return engine.target

    def may_retry(
        self,
        leg: str,
        fault: Fault,
        *,
        lost_with: Target | None = None,
        pulled_from: PrefillerId | None = None,
    ) -> bool:
        assert is_data((leg, fault, lost_with, pulled_from))
        self.budget -= 1
        return self.budget >= 0

    def report(self, report: Report) -> None:
        assert is_data(report)
        match report:
            case LegFailed(target, fault, reason):
                assert reason
                self.blamed.append((target.url, fault))
            case LegSucceeded(target, pull):
                self.praised.append(target.url)
                if pull is not None:
                    self.pulls.append((f"p{pull[0]}", f"d{pull[1]}", None))
            case PullFailed(request, prefiller, rank, fault, reason):
                assert request == 3
                assert reason
                self.pulls.append((f"p{prefiller}", f"d{rank}", fault))
            case EngineSeen(prefiller, engine_id):
                self.prefillers[prefiller].engines.add(engine_id)
            case PromptCounted(_, prompt_tokens):
                assert prompt_tokens == 7
            case KvMissing(prefiller, kind, reason):
                assert kind in ("absent", "unusable", "no_bootstrap")
                self.prefillers[prefiller].without_kv = reason
            case KvAbandoned(how):
                self.abandoned.append(how)
            case StreamLent() | StreamReturned():
                raise AssertionError("there is no pump here")
            case RemotePrefillEnded(prefiller):
                self.prefillers[prefiller].hand_offs -= 1
            case SessionEnded(_, record):
                assert record.outcome is not None
                self.ended_requests += 1

    def observe_gap(self, gap_s: float) -> None:
        assert gap_s >= 0.0

    # What a test does.

    @property
    def in_flight(self) -> list[Sent]:
        """Requests that the engines still work on."""
        return [one for one in self.sent if not one.done]

    @property
    def last(self) -> Sent:
        """The latest of what the engines were sent."""
        return self.sent[-1]

    def is_in(self, phase: Phase) -> bool:
        """Return whether the session is in a phase."""
        return self.session.phase is phase

    def prefill(self, number: int = 0) -> Sent:
        """Have a prefiller start."""
        start_prefill(self.session, self.prefillers[number])
        return self.last

    def decode(self, number: int = 0) -> Sent:
        """Have a rank start."""
        start_decode(self.session, self.ranks[number])
        return self.last

    def to_rank(self) -> Sent:
        """Prefill and decode, as far as the decode leg."""
        self.prefill().answer(200, prefill_answer())
        return self.decode()

    def wait(self, seconds: float) -> None:
        """Let time pass, and look at the deadlines."""
        self.now_s += seconds
        self.session.check_deadline(self.now_s)

    def back_off(self) -> None:
        """Let the backoff be over."""
        assert self.session.phase is Phase.BACKOFF
        self.timers[-1].callback()

    @property
    def at_rest(self) -> bool:
        """Whether nothing of the session goes on anywhere."""
        idle_timers = all(timer.cancelled for timer in self.timers[-1:])
        return not self.in_flight and not self.context.hand_offs and idle_timers
