"""What the admin page shows, made from a snapshot every 0.8 s while somebody looks."""

from collections.abc import Mapping

from balanceroute import __version__
from balanceroute.proxy.live.telemetry.registry import Histogram
from balanceroute.proxy.live.telemetry.snapshot import Snapshot


def view_of(
    state: Snapshot, latencies: Mapping[str, Histogram], *, ready: bool
) -> dict[str, object]:
    """Return the view, which `msgspec` can write."""
    assert state.limits is not None
    return {
        "version": __version__,
        "policy": state.policy,
        "predictor": state.predictor,
        "ready": ready,
        "draining": state.draining,
        "queued": state.queued,
        "prefilling": state.prefilling,
        "pooled": state.pooled,
        "decoding": state.decoding,
        "batch": state.limits.batch,
        "queue_limit": state.limits.queue,
        "pool_limit": state.pool_limit,
        "oldest_pooled_s": state.oldest_pooled_s,
        "step_s": state.step_s,
        "still_ranks": state.still_ranks,
        "idle_ratio": state.idle_ratio,
        "idle_ratios": state.idle_ratios,
        "ranks": state.ranks,
        "prefillers": state.prefillers,
        "engines": state.engines,
        "latencies": {
            name: {"bounds": one.bounds, "counts": one.counted()[0]}
            for name, one in latencies.items()
        },
    }
