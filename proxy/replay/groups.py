"""What each tenant and class got of a replay; see `service_levels`.

A client sees no rank. A request counts as holding KV tokens from its first token to its last.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from balanceroute.proxy.service_levels import (
    ByGroup,
    Group,
    Outcome,
    Service,
    Targets,
    figures_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.replay.sample import Sample

_REFUSALS = frozenset({"http 429", "http 503"})


def group_figures(
    samples: "Sequence[Sample]", span_ns: tuple[int, int], targets: Targets, *, time_scale: float
) -> ByGroup:
    """Return the figures of every tenant and class over a span of the samples' clock."""
    begin_ns, end_ns = span_ns
    outcomes = [_outcome(one, time_scale) for one in samples if begin_ns <= one.sent_ns <= end_ns]
    service: defaultdict[Group, Service] = defaultdict(Service)
    for sample in samples:
        total = service[sample.request.group]
        if sample.finished and begin_ns <= (sample.end_ns or 0) <= end_ns:
            total.requests += 1
        if sample.events:
            _add(total, sample, begin_ns, end_ns)
    return figures_of(outcomes, service, targets)


def _outcome(sample: "Sample", time_scale: float) -> Outcome:
    def seconds(time_ns: float | None) -> float | None:
        return None if time_ns is None else time_ns * time_scale / 1e9

    return Outcome(
        sample.request.group,
        sample.finished,
        sample.fault is not None and sample.fault.kind in _REFUSALS,
        seconds(sample.ttft_ns),
        seconds(sample.tpot_ns),
    )


def _add(total: Service, sample: "Sample", begin_ns: int, end_ns: int) -> None:
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
    # The mean of what it held then: its output grows from the first token to the last.
    middle = ((from_ns + to_ns) / 2 - sample.first_ns) / lasted_ns if lasted_ns else 1.0
    total.kv_token_s += (prompt + middle * output) * (to_ns - from_ns) / 1e9
