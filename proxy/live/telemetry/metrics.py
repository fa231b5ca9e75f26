"""What the proxy tells Prometheus.

Rules:
- Names begin with `balanceroute_` and end with their unit. Where vLLM has a metric of the same
  meaning the rest of the name is vLLM's, so that a dashboard can show both.
- A label takes few values, whatever clients send: endpoints come from a list, a model counts under
  its own name only once an engine has answered for it, and every other label is capped. What is
  left over is `other`.
- What is a state (loads, queues) is read from a snapshot when Prometheus asks; what is an event is
  pushed by the driver when it happens.
"""

from collections.abc import Callable, Sequence

from balanceroute.proxy.live.telemetry import exposition
from balanceroute.proxy.live.telemetry.alias_metrics import AliasMetrics
from balanceroute.proxy.live.telemetry.decision_metrics import DecisionMetrics
from balanceroute.proxy.live.telemetry.engine_metrics import EngineMetrics
from balanceroute.proxy.live.telemetry.group_metrics import GroupMetrics
from balanceroute.proxy.live.telemetry.handshake_metrics import HandshakeMetrics, Handshakes
from balanceroute.proxy.live.telemetry.leg_metrics import LegMetrics
from balanceroute.proxy.live.telemetry.metrics_of_state import StateCollector
from balanceroute.proxy.live.telemetry.predictor_metrics import PredictorMetrics
from balanceroute.proxy.live.telemetry.registry import Histogram, Registry
from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
from balanceroute.proxy.live.telemetry.snapshot import Snapshot
from balanceroute.proxy.live.telemetry.tenant_metrics import TenantMetrics
from balanceroute.proxy.live.telemetry.trace_metrics import TraceMetrics

CONTENT_TYPE = exposition.CONTENT_TYPE
"""The `content-type` of the page."""

_KEPT_S = 1.0


class Metrics:
    """Counts what happens, by subject, and renders the page."""

    def __init__(
        self,
        snapshots: Callable[[], Sequence[Snapshot]],
        *,
        log_lines_dropped: Callable[[], int] = lambda: 0,
        descriptor_shortages: Callable[[], int] = lambda: 0,
        traces: bool = False,
        process: bool = True,
    ) -> None:
        """Start at zero.

        Args:
            snapshots: Gives the state of each deployment to export; called once a page.
            log_lines_dropped: Lines that the logs had to drop since start.
            descriptor_shortages: How often no file descriptor was left.
            traces: Whether requests are traced.
            process: Whether to export the process's own CPU time, memory and open files too.
        """
        self._registry = registry = Registry()
        self.tenants = TenantMetrics()
        registry.collect_from(self.tenants)
        self.groups = GroupMetrics()
        registry.collect_from(self.groups)
        self.aliases = AliasMetrics()
        registry.collect_from(self.aliases)
        self.requests = RequestMetrics(
            registry, tenants=self.tenants, groups=self.groups, aliases=self.aliases
        )
        self.legs = LegMetrics(registry)
        self.engines = EngineMetrics(registry)
        self.predictors = PredictorMetrics(registry)
        self.decisions = DecisionMetrics(registry)
        self.traces = TraceMetrics(registry) if traces else None
        registry.collect_from(
            StateCollector(
                snapshots,
                log_lines_dropped=log_lines_dropped,
                descriptor_shortages=descriptor_shortages,
            )
        )
        if process:
            registry.collect_process()

    def follow_handshakes(self, count: Callable[[], Handshakes]) -> None:
        """Export what becomes of handshakes of HTTP/3 too."""
        self._registry.collect_from(HandshakeMetrics(count))

    def latencies(self) -> dict[str, Histogram]:
        """Return the histograms that show where time goes, by stage."""
        return {**self.requests.latencies(), "itl": self.legs.gaps}

    def render(self) -> bytes:
        """Return the page, in the text format; its type is `CONTENT_TYPE`."""
        return self._registry.render()


class MetricsPage:
    """Called for the page, it renders at most once a second: that takes milliseconds of the loop."""

    def __init__(self, render: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self._render = render
        self._clock = clock
        self._page = b""
        self._until_s = float("-inf")

    def __call__(self) -> bytes:
        """Return a page that is at most a second old."""
        now_s = self._clock()
        if now_s >= self._until_s:
            self._page = self._render()
            self._until_s = now_s + _KEPT_S
        return self._page
