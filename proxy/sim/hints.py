"""Hints on a comparison: that the policies could not differ, or that it will not end."""

from collections.abc import Sequence

from balanceroute.proxy.sim.driver import Deployment
from balanceroute.proxy.sim.experiment import PolicyResult
from balanceroute.proxy.sim.workload import Workload
from balanceroute.traces import TraceRequest

# Below this share of the slots in use requests hardly ever share a rank.
_NEARLY_EMPTY = 0.1
# Each token is a decode step; no model's answers are as long.
_UNENDING_TOKENS = 1_000_000


def hints(
    results: Sequence[PolicyResult], deployment: Deployment, workloads: Sequence[Workload]
) -> list[str]:
    """Return a sentence for each reason why the policies could not differ.

    Args:
        results: The results of the policies, at least one.
        deployment: The machines.
        workloads: The requests.
    """
    found: list[str] = []
    slots = sum(deployment.engines.batches_of(deployment.ranks, deployment.batch_limit))
    share = max(result.mean["mean_running"] for result in results) / slots
    if share < _NEARLY_EMPTY:
        found.append(
            f"The ranks' slots were {100 * share:.1f} % full: with so few requests at a time policies "
            "can hardly differ; try --backlog 64 or a higher --rate."
        )
    capacity = deployment.rank_kv_tokens
    if capacity is not None:
        prompts = [request.prompt_tokens for workload in workloads for request in workload.requests]
        too_long = sum(tokens > capacity for tokens in prompts)
        if 2 * too_long > len(prompts):
            found.append(
                f"{too_long:,} of {len(prompts):,} prompts exceed a rank's KV capacity of {capacity:,} "
                "tokens, so each of these has a rank to itself."
            )
    return found


def unending(requests: Sequence[TraceRequest]) -> str | None:
    """Return a warning if some answers take more steps than a simulation can run."""
    long = [
        request.output_tokens for request in requests if request.output_tokens > _UNENDING_TOKENS
    ]
    if not long:
        return None
    return (
        f"{len(long):,} answers of more than {_UNENDING_TOKENS:,} tokens, the longest {max(long):,}: "
        "each token is a step to simulate"
    )
