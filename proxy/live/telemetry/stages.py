"""Where a request stood when, as far as the times of its record tell."""

from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.live.telemetry.trace import Step


def stages_of(record: RequestRecord) -> list[Step]:
    """Return the stages that a request was in so far, if none of them was repeated."""
    arrived_ns, began_ns = record.arrived_ns, record.prefill_started_ns
    prefilled_ns, admitted_ns, first_ns = (
        record.prefilled_ns,
        record.admitted_ns,
        record.first_token_ns,
    )
    engine = record.rank
    if began_ns is None:
        if admitted_ns is None:
            return [Step("queue", arrived_ns)]
        steps = [Step("pool", arrived_ns)]
        if prefilled_ns is not None:  # The rank called for the prefill.
            steps.append(Step("prefill", admitted_ns, record.prefiller))
            admitted_ns = prefilled_ns
    else:
        steps = [Step("queue", arrived_ns), Step("prefill", began_ns, record.prefiller)]
        if prefilled_ns is not None:
            steps.append(Step("pool", prefilled_ns))
        elif admitted_ns is None:
            engine = record.prefiller  # Which does the whole request.
    if record.early_first_token:
        first_ns = record.second_token_ns
    if admitted_ns is None:
        if first_ns is not None and record.stream:
            steps.append(Step("decode", first_ns, engine))
    elif first_ns is not None and first_ns < admitted_ns:
        # It came on an earlier binding.
        steps.append(Step("decode", admitted_ns, engine))
    else:
        steps.append(Step("transfer" if record.stream else "decode", admitted_ns, engine))
        if first_ns is not None and record.stream:
            steps.append(Step("decode", first_ns, engine))
    return steps
