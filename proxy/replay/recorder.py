"""What a replay measures: times in, figures out, without a clock or a socket of its own.

The window of the figures is the simulator's: it opens when a tenth of the requests have ended (the
fleet is then full of requests of all ages) and closes when the last one has been sent (from then
on the backlog drains). A sample counts if it is complete inside the window: a first token that
arrived, a gap between tokens that ended, a request that finished. A run that is too short for such a
window is measured as a whole, and the report says so.

Tokens are counted as they arrive, by events. An event of a finished request stands for the engine's
token count divided by the request's events. That is 1, unless the engine puts several tokens in an
event.
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from balanceroute.proxy.replay.faults import Fault
from balanceroute.proxy.replay.figures import Measured, ReplayFigures, derive
from balanceroute.proxy.replay.sample import Sample
from balanceroute.proxy.replay.workload import PlannedRequest


class _Mark(NamedTuple):
    """How many samples of each kind there are at an edge of the window."""

    time_ns: int
    sent: int
    first_tokens: int
    second_tokens: int
    gaps: int
    ended: int


@dataclass(slots=True)
class Recorder:
    """Collects the samples of one run.

    Times must not decrease from call to call: the window is then a slice of every list of samples.

    Attributes:
        samples: Those sent, in order.
        events: Token events so far.
        errors: Failed requests so far.
        opened: Where the window opened; None before.
        closed: Where it closed; None before.
    """

    num_requests: int
    samples: list[Sample] = field(default_factory=list)
    events: int = 0
    errors: int = 0
    opened: _Mark | None = None
    closed: _Mark | None = None
    _ended: list[Sample] = field(default_factory=list)
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
        """Return how many requests have been sent and not ended."""
        return len(self.samples) - len(self._ended)

    def sent(self, request: PlannedRequest, due_ns: int, now_ns: int) -> Sample:
        """Note that a request is sent; the last one closes the window."""
        sample = Sample(request, due_ns, now_ns)
        self.samples.append(sample)
        if len(self.samples) == self.num_requests:
            self.close(now_ns)
        return sample

    def close(self, now_ns: int) -> None:
        """Note that nothing more is sent."""
        if self.closed is None:
            self.closed = self._mark(now_ns)

    def tokens(self, sample: Sample, count: int, now_ns: int) -> None:
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
        sample: Sample,
        now_ns: int,
        *,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        """Note that a request got its whole answer."""
        sample.prompt_tokens = prompt_tokens
        sample.output_tokens = sample.events if completion_tokens is None else completion_tokens
        self._end(sample, now_ns)

    def fail(self, sample: Sample, now_ns: int, fault: Fault) -> None:
        """Note that a request failed."""
        sample.fault = fault
        self.errors += 1
        self._end(sample, now_ns)

    def cancel(self, sample: Sample, now_ns: int) -> None:
        """Note that the replay cancelled a request."""
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

    def _end(self, sample: Sample, now_ns: int) -> None:
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
