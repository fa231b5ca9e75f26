"""The public names of each sub-package: adding or losing one is a decision, not an accident."""

import importlib
from pathlib import Path

import pytest

PUBLIC = {
    "balanceroute.predictors": [
        "Capped",
        "ExactMatch",
        "NoPrediction",
        "Oracle",
        "PastRequest",
        "Predictor",
        "PredictorFileError",
        "RequestFeatures",
        "Savable",
        "State",
        "StateError",
        "Survival",
        "load",
        "save",
    ],
    "balanceroute.predictors.gbdt": ["KIND", "Gbdt"],
    "balanceroute.proxy.core.admission": [
        "ADMISSIONS",
        "Admission",
        "BoundedQueue",
        "Ending",
        "Load",
        "Refusal",
    ],
    "balanceroute.proxy.core.policies": [
        "POLICIES",
        "PREDICTING",
        "Assignment",
        "Fleet",
        "Policy",
        "PolicyInputs",
        "PolicySettings",
        "make_policy",
    ],
    "balanceroute.proxy.core.prefill": [
        "PREFILL_CHOICES",
        "FewestTokens",
        "MakePrefillChoice",
        "PrefillChoice",
        "PrefillView",
        "Prefillers",
    ],
    "balanceroute.proxy.core.queueing": [
        "QUEUE_ORDERS",
        "Arrival",
        "MakeQueueOrder",
        "QueueOrder",
    ],
    "balanceroute.proxy.core.scheduler": ["Scheduler", "SchedulerConfig"],
    "balanceroute.proxy.emulate": [
        "DpMode",
        "EmulatedFleet",
        "EmulationSettings",
        "Faults",
        "Preemption",
    ],
    "balanceroute.proxy.live.connectors": [
        "BootstrapIdentity",
        "Connector",
        "MissingKvError",
        "make_connector",
    ],
    "balanceroute.proxy.wire.client": ["Call", "Endpoint", "ResponseHandler"],
    "balanceroute.proxy.wire.server": ["Admit", "Application", "Refuse", "Reply", "Server"],
    "balanceroute.topologies": [
        "CONNECTORS",
        "MAX_RANKS",
        "Command",
        "ConnectorFacts",
        "DecodeEntry",
        "Engines",
        "Finding",
        "KvFlow",
        "PortUse",
        "PrefillEntry",
        "RoleEngines",
        "Topology",
        "TopologyError",
        "check_engines",
        "check_local_prefill",
        "did_you_mean",
        "engine_commands",
        "proxy_command",
        "read_topology",
        "shipped_topologies",
    ],
    "balanceroute.traces": [
        "FORMATS",
        "TraceError",
        "TraceRequest",
        "detect_format",
        "read_names",
        "read_trace",
        "write_native",
    ],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_its_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == PUBLIC[package]
    assert all(hasattr(module, name) for name in PUBLIC[package])


def test_every_package_that_names_its_public_names_is_listed() -> None:
    root = Path(__file__).parents[1]
    found = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("proxy", "predictors", "traces", "topologies", "engine_patch")
        for path in (root / folder).rglob("*.py")
        if "\n__all__ = " in path.read_text(encoding="utf-8")
    }
    assert {f"balanceroute.{name}" for name in found} == set(PUBLIC)
