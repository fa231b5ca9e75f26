"""The metrics that are read from a snapshot of the proxy's state: loads, queues, connections."""

import platform
from collections.abc import Callable, Iterator
from operator import attrgetter

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from balanceroute import __version__
from balanceroute.proxy.live.snapshot import PrefillerState, RankState, Snapshot

# Name, meaning, and the field of the snapshot.
_RANK_GAUGES: tuple[tuple[str, str, Callable[[RankState], float]], ...] = (
    ("rank_kv_tokens", "KV tokens on the rank.", attrgetter("kv_tokens")),
    ("rank_bound_requests", "Requests bound to the rank.", attrgetter("bound")),
    ("rank_started_requests", "Requests that the rank decodes.", attrgetter("started")),
    ("rank_free_slots", "Slots that the rank has free.", attrgetter("free_slots")),
    ("rank_open", "Whether the rank takes new requests.", lambda rank: int(rank.open)),
)
_PREFILLER_GAUGES: tuple[tuple[str, str, Callable[[PrefillerState], float]], ...] = (
    ("prefiller_probes", "Probes that run on the prefiller.", attrgetter("probes")),
    (
        "prefiller_held_tokens",
        "KV tokens that the prefiller holds for requests.",
        attrgetter("held_tokens"),
    ),
    (
        "prefiller_utilisation_ratio",
        "KV-cache use that the prefiller counts with.",
        attrgetter("utilisation"),
    ),
    ("prefiller_open", "Whether the prefiller takes new probes.", lambda one: int(one.open)),
)
_GAUGES: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("oldest_pooled_seconds", "Age of the oldest pooled request.", attrgetter("oldest_pooled_s")),
    (
        "imbalance_tokens",
        "Largest minus smallest KV load of the ranks.",
        attrgetter("imbalance_tokens"),
    ),
    ("decode_step_seconds", "Mean inferred time of a decode step.", attrgetter("step_s")),
    (
        "barrier_idle_ratio",
        "Share of rank time lost at the barrier since start.",
        lambda state: state.idle_tokens / state.capacity_tokens if state.capacity_tokens else 0.0,
    ),
    ("client_connections", "Connections of clients.", attrgetter("client_connections")),
    ("engine_connections", "Connections to engines.", attrgetter("engine_connections")),
    ("draining", "Whether the proxy takes no new requests.", lambda state: int(state.draining)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("decode_steps", "Decode steps inferred.", attrgetter("steps")),
    (
        "barrier_idle_tokens",
        "KV tokens that ranks had less than the fullest, summed over steps.",
        attrgetter("idle_tokens"),
    ),
    (
        "barrier_capacity_tokens",
        "Ranks times the KV tokens of the fullest, summed over steps.",
        attrgetter("capacity_tokens"),
    ),
)


class StateCollector(Collector):
    """Exports one snapshot whenever the page is rendered."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], log_lines_dropped: Callable[[], int]
    ) -> None:
        self._snapshot = snapshot
        self._log_lines_dropped = log_lines_dropped

    def collect(self) -> Iterator[Metric]:
        """Take a snapshot and yield what it says."""
        state = self._snapshot()
        # The number tells apart an engine that left and one that came back under its name. One
        # label set for all metrics of a rank: the page escapes it once.
        rank_labels = [{"rank": str(rank.rank), "name": rank.name} for rank in state.ranks]
        for name, documentation, value in _RANK_GAUGES:
            values = [value(rank) for rank in state.ranks]
            yield _family("gauge", name, documentation, rank_labels, values)
        labels = [{"prefiller": str(one.prefiller), "name": one.name} for one in state.prefillers]
        for name, documentation, prefiller_value in _PREFILLER_GAUGES:
            values = [prefiller_value(one) for one in state.prefillers]
            yield _family("gauge", name, documentation, labels, values)
        yield _family(
            "gauge",
            "live_requests",
            "Requests in the proxy, by state.",
            [{"state": name} for name in ("queued", "prefilling", "pooled", "decoding")],
            [state.queued, state.prefilling, state.pooled, state.decoding],
        )
        for name, documentation, state_value in _GAUGES:
            yield _family("gauge", name, documentation, [{}], [state_value(state)])
        for name, documentation, state_value in _COUNTERS:
            yield _family("counter", name, documentation, [{}], [state_value(state)])
        dropped = self._log_lines_dropped()
        yield _family("counter", "log_lines_dropped", "Log lines dropped.", [{}], [dropped])
        built = {
            "version": __version__,
            "python": platform.python_version(),
            "policy": state.policy,
            "predictor": state.predictor,
        }
        yield _family("gauge", "build_info", "What runs here; always 1.", [built], [1])


def _family(
    kind: str,
    name: str,
    documentation: str,
    labels: list[dict[str, str]],
    values: list[float],
) -> Metric:
    family = Metric(f"balanceroute_{name}", documentation, kind)
    sample_name = f"{family.name}_total" if kind == "counter" else family.name
    family.samples = [
        Sample(sample_name, label, value) for label, value in zip(labels, values, strict=True)
    ]
    return family
