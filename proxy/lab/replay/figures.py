"""The figures of a replay; their names are those of the JSON report, and the simulator's."""

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.lab.replay.requests import PlannedRequest
from balanceroute.proxy.lab.service_levels import (
    ByGroup,
    GivenService,
    ServiceGroup,
    ServiceOutcome,
    ServiceTargets,
    figures_of,
    percentiles,
)
from balanceroute.proxy.wire.messages import WireError, WireFault

# Why a request failed: a kind to count by, and a message to read.

TIMEOUT = "timeout"
ERROR_EVENT = "error event"
SHORT_STREAM = "short stream"
MALFORMED_EVENT = "malformed event"
UNREAD_FLEET = "fleet figures"

_KINDS = {
    WireFault.CONNECT: "connect",
    WireFault.NO_ADDRESS: "no address",
    WireFault.CONNECT_TIMEOUT: "connect timeout",
    WireFault.RESET: "reset",
    WireFault.STALE: "reset",
    WireFault.PROTOCOL: "protocol",
    WireFault.TOO_LARGE: "too large",
    WireFault.TIMEOUT: TIMEOUT,
    WireFault.TOO_LATE: "too late",
}
_SHOWN_CHARACTERS = 200


class ReplayFault(NamedTuple):
    kind: str
    message: str


class FaultCount(NamedTuple):
    """How often a kind of failure happened, and the first one's message."""

    kind: str
    requests: int
    example: str


def count_faults(faults: Iterable[ReplayFault]) -> list[FaultCount]:
    """Return the kinds of failure, the most frequent first."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for kind, message in faults:
        examples.setdefault(kind, message)
        counts[kind] += 1
    return [FaultCount(kind, count, examples[kind]) for kind, count in counts.most_common()]


def from_wire(error: WireError) -> ReplayFault:
    return ReplayFault(_KINDS[error.kind], shown(str(error)))


def from_status(status: int, body: bytes) -> ReplayFault:
    """Return the failure for a status other than 200, with the message of its body."""
    text = body.decode(errors="replace")
    # A server between the two may not answer in JSON.
    with suppress(ValueError, RecursionError):
        text = error_message(json.loads(text)) or text
    return ReplayFault(f"http {status}", shown(text))


def error_message(chunk: object) -> str | None:
    """Return the message of an OpenAI error object; None if the JSON value is none."""
    error = chunk.get("error") if isinstance(chunk, dict) else None
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else json.dumps(error)


def shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"


@dataclass(slots=True)
class RequestSample:
    """The record of one request; times are of the replay's clock."""

    request: PlannedRequest
    due_ns: int
    sent_ns: int
    first_ns: int = 0  # When its first token arrived.
    second_ns: int = 0  # When its second token arrived.
    last_ns: int = 0  # When its latest token arrived.
    end_ns: int | None = None  # When it ended; None while it runs.
    events: int = 0  # Token events so far.
    window_events: int = 0  # Those inside the window.
    prompt_tokens: int | None = None  # The engine's count, if reported.
    # The engine's count if reported, else the events; 0 until it has finished.
    output_tokens: int = 0
    fault: ReplayFault | None = None  # Why it failed; None if it did not.
    retry_after: str | None = None  # The header of a refusal; None without one.
    cancelled: bool = False  # Whether it was cancelled when the replay was interrupted.

    @property
    def finished(self) -> bool:
        return self.end_ns is not None and self.fault is None and not self.cancelled

    def tokens_of(self, events: int) -> float:
        """Return how many tokens some of the request's events stand for."""
        return (
            events * self.output_tokens / self.events if self.finished and self.events else events
        )

    @property
    def ttft_ns(self) -> int | None:
        """Return the time to the first token; None before it arrived."""
        return self.first_ns - self.sent_ns if self.events else None

    @property
    def ttst_ns(self) -> int | None:
        """Return the time to the second token; None before it arrived."""
        return self.second_ns - self.sent_ns if self.events > 1 else None

    @property
    def e2e_ns(self) -> int | None:
        """Return the time from sending to the end; None unless the request finished."""
        return self.end_ns - self.sent_ns if self.finished and self.end_ns is not None else None

    @property
    def tpot_ns(self) -> float | None:
        """Return the mean time between tokens; None for fewer than two of a finished request."""
        if not self.finished or not self.events or self.output_tokens < 2:
            return None
        return (self.last_ns - self.first_ns) / (self.output_tokens - 1)


STEADY_STATE = "from a tenth of the requests ended to the last one sent"
WHOLE_RUN = "the whole run, too short for a steady state"


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of a stretch of time."""

    duration_ns: int
    sent: int  # Requests sent in it.
    ended: Sequence[RequestSample]  # Requests that ended in it.
    ttft_ns: NDArray[np.int64]  # Times to first tokens that arrived in it.
    ttst_ns: NDArray[np.int64]  # The same of second tokens.
    gaps_ns: NDArray[np.int64]  # Gaps between tokens that ended in it.
    tokens: float  # Output tokens that arrived in it.


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """The figures of one replay, in the target's time; None if there was nothing to measure."""

    # The time span of the figures up to `duration_s`; those below are of the whole run.
    window: str
    output_tokens_per_s: float | None  # Tokens that arrived, over the duration.
    # Of requests that finished, the mean time between tokens after the first.
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    ttft_ms_p50: float | None  # Time from sending to the first token.
    ttft_ms_p95: float | None
    ttft_ms_p99: float | None
    # Time from sending to the second token, which a proxy that gives the first one early does not
    # shorten.
    ttst_ms_p50: float | None
    ttst_ms_p95: float | None
    ttst_ms_p99: float | None
    itl_ms_p50: float | None  # Each gap between two tokens that followed each other.
    itl_ms_p95: float | None
    itl_ms_p99: float | None
    e2e_s_p50: float | None  # Of requests that finished, the time from sending to the end.
    e2e_s_p95: float | None
    e2e_s_p99: float | None
    requests: int  # Requests that finished.
    requests_per_s: float | None  # Those over the duration.
    request_rate: float | None  # Requests sent, over the duration.
    duration_s: float  # Length of the window.
    finished: int  # Requests that finished.
    errors: int  # Requests that failed.
    cancelled: int  # Requests cancelled when the replay was interrupted.
    run_s: float  # From the first request sent to the last one ended.
    send_late_ms_p99: float | None  # How late requests were sent, a delay of the replay itself.
    prompt_tokens_asked: int  # Words of the prompts of requests that finished.
    prompt_tokens: int | None  # The engines' count of them; None unless reported for every request.
    output_tokens_asked: int  # Recorded output, cut at the limits, of requests that finished.
    output_tokens: int  # The engines' count of it.
    wrong_lengths: int  # Finished requests with more or less output than asked.
    uneven_events: int  # Finished requests with another number of token events than tokens.


def derive(
    samples: Sequence[RequestSample], *, whole: Measured, window: Measured | None, time_scale: float
) -> ReplayFigures:
    """Return the figures of a run.

    Args:
        window: The steady state; None if it was never reached.
        time_scale: Seconds of the target's time in a second of the samples' times.
    """
    steady = window is not None and window.duration_ns > 0 and any(s.finished for s in window.ended)
    chosen = window if steady and window is not None else whole
    finished = [sample for sample in chosen.ended if sample.finished]
    e2e_ns = [span for sample in finished if (span := sample.e2e_ns) is not None]
    tpot = percentiles([v for s in finished if (v := s.tpot_ns) is not None], 1e6 / time_scale)
    ttft = percentiles(chosen.ttft_ns, 1e6 / time_scale)
    ttst = percentiles(chosen.ttst_ns, 1e6 / time_scale)
    itl = percentiles(chosen.gaps_ns, 1e6 / time_scale)
    e2e = percentiles(e2e_ns, 1e9 / time_scale)
    late = percentiles([sample.sent_ns - sample.due_ns for sample in samples], 1e6 / time_scale)
    seconds = time_scale * chosen.duration_ns / 1e9
    complete = [sample for sample in samples if sample.finished]
    return ReplayFigures(
        window=STEADY_STATE if steady else WHOLE_RUN,
        output_tokens_per_s=_per(chosen.tokens, seconds),
        tpot_ms_p50=tpot[0],
        tpot_ms_p95=tpot[1],
        ttft_ms_p50=ttft[0],
        ttft_ms_p95=ttft[1],
        ttft_ms_p99=ttft[2],
        ttst_ms_p50=ttst[0],
        ttst_ms_p95=ttst[1],
        ttst_ms_p99=ttst[2],
        itl_ms_p50=itl[0],
        itl_ms_p95=itl[1],
        itl_ms_p99=itl[2],
        e2e_s_p50=e2e[0],
        e2e_s_p95=e2e[1],
        e2e_s_p99=e2e[2],
        requests=len(finished),
        requests_per_s=_per(len(finished), seconds),
        request_rate=_per(chosen.sent, seconds),
        duration_s=seconds,
        finished=len(complete),
        errors=sum(sample.fault is not None for sample in samples),
        cancelled=sum(sample.cancelled for sample in samples),
        run_s=time_scale * whole.duration_ns / 1e9,
        send_late_ms_p99=late[2],
        prompt_tokens_asked=sum(sample.request.prompt_tokens for sample in complete),
        prompt_tokens=_sum_of_known([sample.prompt_tokens for sample in complete]),
        output_tokens_asked=sum(sample.request.answer_tokens for sample in complete),
        output_tokens=sum(sample.output_tokens for sample in complete),
        wrong_lengths=sum(s.output_tokens != s.request.answer_tokens for s in complete),
        uneven_events=sum(sample.events != sample.output_tokens for sample in complete),
    )


def _per(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _sum_of_known(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


# The service of each tenant and class in a replay; see `service_levels`.
#
# A client sees no rank. A request counts as holding KV tokens from its first token to its last.

_REFUSALS = frozenset({"http 429", "http 503"})


def group_figures(
    samples: "Sequence[RequestSample]",
    span_ns: tuple[int, int],
    targets: ServiceTargets,
    *,
    time_scale: float,
) -> ByGroup:
    """Return the figures of every tenant and class over a span of the samples' clock."""
    begin_ns, end_ns = span_ns
    outcomes = [_outcome(one, time_scale) for one in samples if begin_ns <= one.sent_ns <= end_ns]
    service: defaultdict[ServiceGroup, GivenService] = defaultdict(GivenService)
    for sample in samples:
        total = service[sample.request.group]
        if sample.finished and begin_ns <= (sample.end_ns or 0) <= end_ns:
            total.requests += 1
        if sample.events:
            _add(total, sample, begin_ns, end_ns)
    return figures_of(outcomes, service, targets)


def _outcome(sample: "RequestSample", time_scale: float) -> ServiceOutcome:
    def seconds(time_ns: float | None) -> float | None:
        return None if time_ns is None else time_ns * time_scale / 1e9

    return ServiceOutcome(
        sample.request.group,
        sample.finished,
        sample.fault is not None and sample.fault.kind in _REFUSALS,
        seconds(sample.ttft_ns),
        seconds(sample.tpot_ns),
    )


def _add(total: GivenService, sample: "RequestSample", begin_ns: int, end_ns: int) -> None:
    """Add the tokens that a request had in the span, as if they had come evenly."""
    prompt = sample.prompt_tokens or sample.request.prompt_tokens
    output = sample.tokens_of(sample.events)
    lasted_ns = sample.last_ns - sample.first_ns
    from_ns, to_ns = max(begin_ns, sample.first_ns), min(end_ns, sample.last_ns)
    if begin_ns <= sample.first_ns <= end_ns:
        total.tokens += prompt
    if from_ns > to_ns:
        return
    share = (to_ns - from_ns) / lasted_ns if lasted_ns else 1.0
    total.tokens += share * output
    # The mean of its load then: its output grows from the first token to the last.
    middle = ((from_ns + to_ns) / 2 - sample.first_ns) / lasted_ns if lasted_ns else 1.0
    total.kv_token_s += (prompt + middle * output) * (to_ns - from_ns) / 1e9


# The measurements of a replay: times in, figures out, without a clock or a socket of its own.
#
# The window of the figures is the simulator's: it opens when a tenth of the requests have ended
# (the fleet is then full of requests of all ages) and closes when the last one has been sent
# (from then on the backlog drains). A sample counts if it is complete inside the window: a first
# token that arrived, a gap between tokens that ended, a request that finished. A run that is too
# short for such a window is measured as a whole, and the report says so.
#
# Tokens are counted as they arrive, by events. An event of a finished request stands for the
# engine's token count divided by the request's events. That is 1, unless the engine puts several
# tokens in an event.


class _Mark(NamedTuple):
    """How many samples of each kind there are at an edge of the window."""

    time_ns: int
    sent: int
    first_tokens: int
    second_tokens: int
    gaps: int
    ended: int


@dataclass(slots=True)
class ReplayRecorder:
    """Collects the samples of one run.

    Times must not decrease from call to call: the window is then a slice of every list of samples.
    """

    num_requests: int
    samples: list[RequestSample] = field(default_factory=list)  # Those sent, in order.
    events: int = 0  # Token events so far.
    errors: int = 0  # Failed requests so far.
    opened: _Mark | None = None  # Where the window opened; None before.
    closed: _Mark | None = None  # Where it closed; None before.
    _ended: list[RequestSample] = field(default_factory=list)
    _last_end_ns: int = 0
    _ttft_ns: "array[int]" = field(default_factory=lambda: array("q"))
    _ttst_ns: "array[int]" = field(default_factory=lambda: array("q"))
    _gaps_ns: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def ended(self) -> int:
        """Return how many requests have finished, failed or been cancelled."""
        return len(self._ended)

    @property
    def running(self) -> int:
        return len(self.samples) - len(self._ended)

    def sent(self, request: PlannedRequest, due_ns: int, now_ns: int) -> RequestSample:
        """Note that a request is sent; the last one closes the window."""
        sample = RequestSample(request, due_ns, now_ns)
        self.samples.append(sample)
        if len(self.samples) == self.num_requests:
            self.close(now_ns)
        return sample

    def close(self, now_ns: int) -> None:
        """Note that nothing more is sent."""
        if self.closed is None:
            self.closed = self._mark(now_ns)

    def tokens(self, sample: RequestSample, count: int, now_ns: int) -> None:
        """Note that `count` token events of a request arrived together."""
        if sample.events:
            self._gaps_ns.append(now_ns - sample.last_ns)
        else:
            sample.first_ns = now_ns
            self._ttft_ns.append(now_ns - sample.sent_ns)
        if sample.events < 2 <= sample.events + count:
            sample.second_ns = now_ns
            self._ttst_ns.append(now_ns - sample.sent_ns)
        if count > 1:
            self._gaps_ns.extend([0] * (count - 1))
        sample.last_ns = now_ns
        sample.events += count
        self.events += count
        if self.opened is not None and self.closed is None:
            sample.window_events += count

    def finish(
        self,
        sample: RequestSample,
        now_ns: int,
        *,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        """Note that a request got its whole answer."""
        sample.prompt_tokens = prompt_tokens
        sample.output_tokens = sample.events if completion_tokens is None else completion_tokens
        self._end(sample, now_ns)

    def fail(self, sample: RequestSample, now_ns: int, fault: ReplayFault) -> None:
        sample.fault = fault
        self.errors += 1
        self._end(sample, now_ns)

    def cancel(self, sample: RequestSample, now_ns: int) -> None:
        sample.cancelled = True
        self._end(sample, now_ns)

    def figures(self, *, time_scale: float) -> ReplayFigures:
        """Return the figures, of the window or else of the whole run.

        `time_scale` is the seconds of the target's time in a second of the clock.
        """
        start_ns = self.samples[0].sent_ns if self.samples else 0
        begin, end = _Mark(start_ns, 0, 0, 0, 0, 0), self._mark(max(start_ns, self._last_end_ns))
        tokens = sum(sample.tokens_of(sample.events) for sample in self.samples)
        whole = self._between(begin, end, tokens)
        window = None
        if self.opened is not None and self.closed is not None:
            tokens = sum(sample.tokens_of(sample.window_events) for sample in self.samples)
            window = self._between(self.opened, self.closed, tokens)
        return derive(self.samples, whole=whole, window=window, time_scale=time_scale)

    def span_ns(self, *, steady: bool) -> tuple[int, int]:
        """Return when the window opened and closed, or the whole run began and ended."""
        if steady and self.opened is not None and self.closed is not None:
            return self.opened.time_ns, self.closed.time_ns
        start_ns = self.samples[0].sent_ns if self.samples else 0
        return start_ns, max(start_ns, self._last_end_ns)

    def _between(self, begin: _Mark, end: _Mark, tokens: float) -> Measured:
        return Measured(
            duration_ns=end.time_ns - begin.time_ns,
            sent=end.sent - begin.sent,
            ended=self._ended[begin.ended : end.ended],
            ttft_ns=np.array(self._ttft_ns[begin.first_tokens : end.first_tokens]),
            ttst_ns=np.array(self._ttst_ns[begin.second_tokens : end.second_tokens]),
            gaps_ns=np.array(self._gaps_ns[begin.gaps : end.gaps]),
            tokens=tokens,
        )

    def _end(self, sample: RequestSample, now_ns: int) -> None:
        assert sample.end_ns is None, f"request {sample.request.number} ended twice"
        sample.end_ns = self._last_end_ns = now_ns
        self._ended.append(sample)
        unopened = self.opened is None and self.closed is None
        if unopened and 10 * len(self._ended) >= self.num_requests:
            self.opened = self._mark(now_ns)

    def _mark(self, now_ns: int) -> _Mark:
        return _Mark(
            now_ns,
            len(self.samples),
            len(self._ttft_ns),
            len(self._ttst_ns),
            len(self._gaps_ns),
            len(self._ended),
        )
