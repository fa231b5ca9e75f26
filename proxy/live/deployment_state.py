"""The state of one deployment, as the admin page shows it and the metrics export it."""

from typing import TYPE_CHECKING

from balanceroute.proxy.live.control.state import take_snapshot
from balanceroute.proxy.live.prediction import predictor_name
from balanceroute.proxy.live.telemetry.snapshot import LimitsState

if TYPE_CHECKING:
    from balanceroute.proxy.live.deployment import Deployment
    from balanceroute.proxy.live.settings.declared import ExchangeLimits
    from balanceroute.proxy.live.telemetry.snapshot import Held, Snapshot


def snapshot_of(
    deployment: "Deployment",
    group: str,
    held: "Held",
    limits: "ExchangeLimits",
    *,
    requests: bool,
    scores: bool,
) -> "Snapshot":
    """Return the state of a deployment.

    Args:
        deployment: The deployment.
        group: Its name; empty if it is the only one.
        held: What the whole proxy holds.
        limits: Of the whole proxy.
        requests: Whether each live request is in it.
        scores: Whether the predictors' scores are, which are expensive.
    """
    config = deployment.config
    return take_snapshot(
        deployment.driver,
        group=group,
        policy=deployment.policy,
        predictor=predictor_name(config.scheduling.predictor),
        predictors=deployment.predictors.scores() if scores else [],
        tenants=deployment.tenancy.states(),
        rows_judged=deployment.predictors.judged,
        held=held,
        quarantines=deployment.quarantines(),
        gauges=deployment.scraper.gauges(),
        limits=LimitsState(
            config.scheduling.batch,
            config.admission.queue_limit,
            limits.connection_limit,
            limits.body_budget_bytes,
        ),
        requests=requests,
    )
