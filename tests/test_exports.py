"""The public names that packages and modules state: adding or losing one is a decision."""

import importlib
import re

import pytest
from tests.script import script

house = script("house")
TABLE = """
predictors: Capped Hinted NoPrediction Oracle PastRequest Predictor RequestFeatures Savable State StateError
    Survival
predictors.gbdt: Gbdt KIND
proxy.core.admission: ADMISSIONS Admission AimdOptions AimdSettings Allowance BoundedQueue Decision EXPECTING
    Ending Load POST_4 POST_5 Rate Refusal TenantLimits
proxy.core.policies: Assignment Fleet OldestFirst POLICIES PREDICTING Policy PolicyInputs PolicySettings PoolEntry
    is_outside make_policy predicts skill_share
proxy.core.prefill: FewestTokens MakePrefillChoice PREFILL_CHOICES PrefillChoice PrefillInputs
    PrefillRequest PrefillView Prefillers ScoreSettings USING_BLOCKS USING_EVENTS USING_LOADS
proxy.core.queueing: ByTicket COSTS FAIR_COSTS Fcfs MakeQueueOrder MakeStartOrder PREDICTING_ORDERS
    QUEUE_ORDERS QueueOrder StartOrder
proxy.core.scheduler: Scheduler SchedulerConfig
proxy.lab.emulate: DpMode EmulatedFleet EmulationSettings Faults Frontend Preemption
proxy.live.connectors: BootstrapIdentity Connector MissingKv MissingKvError make_connector
proxy.wire.http1.client: Call Endpoint ResponseHandler
proxy.wire.http1.server: Admit Application Refuse Reply Server
topologies: CONNECTORS ConnectorFacts Finding KvFlow MAX_RANKS TopologyError did_you_mean
traces: FORMATS TraceError TraceRequest detect_format read_mix read_names read_trace shipped_traces with_sessions
    write_native
"""
PUBLIC = {
    name: names.split()
    for name, names in (row.split(":") for row in re.split(r"\n(?=\w)", TABLE.strip()))
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_package_has_its_public_names(name: str) -> None:
    package = importlib.import_module(f"balanceroute.{name}")
    assert sorted(package.__all__) == PUBLIC[name]
    assert all(hasattr(package, one) for one in PUBLIC[name])


def test_everything_that_states_its_names_is_in_the_table() -> None:
    found = {
        house.module(path)
        for path in house.python_files(*house.TOP_LEVEL)
        if "\n__all__ = " in path.read_text(encoding="utf-8")
    }
    assert found == set(PUBLIC)
