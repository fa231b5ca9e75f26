"""The figures of a replay; their names are those of the JSON report, and the simulator's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.replay.sample import Sample

STEADY_STATE = "from a tenth of the requests ended to the last one sent"
WHOLE_RUN = "the whole run, too short for a steady state"


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of a stretch of time.

    Attributes:
        sent: Requests sent in it.
        ended: Requests that ended in it.
        ttft_ns: Times to first tokens that arrived in it.
        ttst_ns: The same of second tokens.
        gaps_ns: Gaps between tokens that ended in it.
        tokens: Output tokens that arrived in it.
    """

    duration_ns: int
    sent: int
    ended: Sequence[Sample]
    ttft_ns: NDArray[np.int64]
    ttst_ns: NDArray[np.int64]
    gaps_ns: NDArray[np.int64]
    tokens: float


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """The figures of one replay, in the target's time; None if there was nothing to measure.

    Attributes:
        window: The time span of the figures up to `duration_s`; those below are of the whole run.
        output_tokens_per_s: Tokens that arrived, over the duration.
        tpot_ms_p50: Of requests that finished, the mean time between tokens after the first.
        ttft_ms_p50: Time from sending to the first token.
        ttst_ms_p50: Time from sending to the second token, which a proxy that gives the first one
            early does not shorten.
        itl_ms_p50: Each gap between two tokens that followed each other.
        e2e_s_p50: Of requests that finished, the time from sending to the end.
        requests: Requests that finished.
        requests_per_s: Those over the duration.
        request_rate: Requests sent, over the duration.
        duration_s: Length of the window.
        finished: Requests that finished.
        errors: Requests that failed.
        cancelled: Requests cancelled when the replay was interrupted.
        run_s: From the first request sent to the last one ended.
        send_late_ms_p99: How late requests were sent, a delay of the replay itself.
        prompt_tokens_asked: Words of the prompts of requests that finished.
        prompt_tokens: The engines' count of them; None unless reported for every request.
        output_tokens_asked: Recorded output, cut at the limits, of requests that finished.
        output_tokens: The engines' count of it.
        wrong_lengths: Finished requests with more or less output than asked.
        uneven_events: Finished requests with another number of token events than tokens.
    """

    window: str
    output_tokens_per_s: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    ttft_ms_p99: float | None
    ttst_ms_p50: float | None
    ttst_ms_p95: float | None
    ttst_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    itl_ms_p99: float | None
    e2e_s_p50: float | None
    e2e_s_p95: float | None
    e2e_s_p99: float | None
    requests: int
    requests_per_s: float | None
    request_rate: float | None
    duration_s: float
    finished: int
    errors: int
    cancelled: int
    run_s: float
    send_late_ms_p99: float | None
    prompt_tokens_asked: int
    prompt_tokens: int | None
    output_tokens_asked: int
    output_tokens: int
    wrong_lengths: int
    uneven_events: int


def derive(
    samples: Sequence[Sample],
    *,
    whole: Measured,
    window: Measured | None,
    time_scale: float,
) -> ReplayFigures:
    """Return the figures of a run.

    Args:
        samples: The samples of every request sent.
        whole: The whole run.
        window: The steady state; None if it was never reached.
        time_scale: Seconds of the target's time in a second of the samples' times.
    """
    steady = window is not None and window.duration_ns > 0 and any(s.finished for s in window.ended)
    chosen = window if steady and window is not None else whole
    finished = [sample for sample in chosen.ended if sample.finished]
    e2e_ns = [span for sample in finished if (span := sample.e2e_ns) is not None]
    tpot = _percentiles([v for s in finished if (v := s.tpot_ns) is not None], 1e6 / time_scale)
    ttft = _percentiles(chosen.ttft_ns, 1e6 / time_scale)
    ttst = _percentiles(chosen.ttst_ns, 1e6 / time_scale)
    itl = _percentiles(chosen.gaps_ns, 1e6 / time_scale)
    e2e = _percentiles(e2e_ns, 1e9 / time_scale)
    late = _percentiles([sample.sent_ns - sample.due_ns for sample in samples], 1e6 / time_scale)
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


def _percentiles(
    values: Sequence[float] | NDArray[np.int64], unit: float
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the 50th, 95th and 99th percentile in a unit; None of nothing."""
    if len(values) == 0:
        return None, None, None
    p50, p95, p99 = np.percentile(values, [50, 95, 99]) / unit
    return float(p50), float(p95), float(p99)


def _per(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _sum_of_known(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
