"""The export of traces, if the settings ask for it. Else nothing of it is imported."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.live.environment import Environment
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.live.telemetry.trace_metrics import TraceMetrics
    from balanceroute.proxy.live.tracing.exporter import SpanExporter


def trace_export(
    config: "ProxyConfig", environment: "Environment", metrics: "TraceMetrics | None"
) -> "SpanExporter | None":
    """Return what exports traces; None if nothing does."""
    settings = config.tracing
    if settings is None or metrics is None:
        return None
    from balanceroute.proxy.live.security.tls import engine_context  # noqa: PLC0415
    from balanceroute.proxy.live.tracing.exporter import SpanExporter  # noqa: PLC0415
    from balanceroute.proxy.wire.http1.client import Endpoint  # noqa: PLC0415

    is_https = settings.scheme == "https"
    return SpanExporter(
        settings,
        Endpoint(
            settings.host,
            settings.port,
            ssl=engine_context(settings.ca_file, insecure=False) if is_https else None,
            connect_timeout_s=config.times.connect_timeout_s,
        ),
        metrics,
        in_thread=environment.in_thread,
        rng=environment.rng,
    )
