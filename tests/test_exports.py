"""The public names of each package: adding or losing one is a decision, not an accident.

They are those in `__all__`, or else the modules. `proxy/testing` has none: it is not in the wheel.
"""

import importlib
import pkgutil
import re

import pytest
from tests.script import ROOT, script

house = script("house")
TABLE = """
engine_patch: hooks identity plugin reader records writer
predictors: Capped ExactMatch Hinted NoPrediction Oracle PastRequest Predictor PredictorFileError
    RequestFeatures Savable State StateError Survival load save
predictors.gbdt: Gbdt KIND
proxy: __main__ advise audit cli core emulate live model_choice page_client pictures replay service_levels sim validate wire
proxy.cli: advise audit command_line drain emulate engine_flags engine_parser evaluate evaluation_plots goodput_flags hash_key judgement_report machine_flags
    model_router online_check outputs parser past_flags replay serve simulate stage_bar topology trace_flags train up validate watched_fleet
proxy.core: admission avoidance balance config curves decision deposits errors events fscore holdings
    intake kv_peak leases ledger lifecycle local_prefill losses others outside pace placement policies pool prediction prefill
    prefill_queue projection queueing rank_memory rank_progress rank_prompts rank_speeds rank_trajectories ranks recount scheduler skill
    step_model subset switching time_limits timers trajectories triples turnover warm_up
proxy.core.admission: ADMISSIONS Admission Aimd AimdSettings Allowance BoundedQueue Budget Decision
    EXPECTING EarlyRefusal Ending FirstTokens Load POST_4 POST_5 Rate Refusal TenantLimits Tenants
proxy.core.policies: Assignment Fleet POLICIES PREDICTING Policy PolicyInputs PolicySettings
    is_outside make_policy predicts skill_share
proxy.core.policies.two_stage: TwoStage TwoStageSettings ignore_stage
proxy.core.prefill: FewestTokens MakePrefillChoice PREFILL_CHOICES PrefillChoice PrefillInputs
    PrefillRequest PrefillView Prefillers ScoreLimits USING_BLOCKS USING_EVENTS USING_LOADS
proxy.core.queueing: ByTicket COSTS FAIR_COSTS FairQueue FairQueueing FairShares Fcfs InTurn KvMeter
    MakeQueueOrder MakeStartOrder PREDICTING_ORDERS QUEUE_ORDERS QueueOrder StartOrder fair_queueing
proxy.core.scheduler: Scheduler SchedulerConfig
proxy.emulate: DpMode EmulatedFleet EmulationSettings Faults Frontend Preemption
proxy.live: announcement connectors control deployment deployment_state descriptors discovery
    engine_connections engines environment following_kv_events frontend group_orders hand_over http3_listener kept_groups kept_orders listeners openai prediction process_edge proxy
    request scheduling security serve settings telemetry
    trace_export tracing
proxy.live.connectors: BootstrapIdentity Connector MissingKv MissingKvError make_connector
proxy.live.control: admin answers drain_deadlines engine_orders errors group_pages live_view load_log memory orders page pause_pages pausing rank_slots readiness roster silent_decoders sleepers standing state view
    workers
proxy.live.discovery: dns_name endpoint_slices found kubernetes line_stream reconciler sources
    watched_file
proxy.live.engines: bootstrap engine_facts engine_gauges engine_url faults fetcher first_tokens health instances
    kv_event_batch kv_feed
    kv_subscriber kv_transfers model_list pairing
    scrape served_models
proxy.live.frontend: aliases asking body_queue clients conversation cors fall_back gateway generation groups hand_offs known_head model_pages model_routes
    pass_through refusals
    request_head single_exchange tenancy
proxy.live.openai: answer answer_events api_error backed_up_ids body completion_stream context_limit continuation
    continuation_stream engine_error first_token form_body generated_ids held_end json_scan json_text json_value leg_body named_events numeric_members
    prefill_answer prompt_blocks prompt_keys prompt_summary repeated_text repeating_stream resume routes shape stream_event
    stream_opening stream_reader token_continuation token_continuation_stream token_counts token_estimate token_events token_ids token_shape token_stream told told_logprobs transcript urgency
    usage
proxy.live.prediction: predictor_set predictors
proxy.live.request: buffered_leg client_answer decode_attempt direct early_token emitted failures hand_off
    holding kv_handle leg_settings lost_engines phases prefill_attempt recovery relay reports
    resume retry_budget
    session session_host session_trace short_answer stall_watch stream_looks suspects
proxy.live.scheduling: apart arrival barrier_idle decisions driver feedback forecast isolation open_instances others_on_ranks prefiller_loads progress progress_veto pulled_counts pumped_counts session_table
    step_clock stranded sweep sweep_timer tick_timer unique_tokens
proxy.live.security: credentials host_check tls
proxy.live.settings: admission aimd_options aliases checks config configure declared discovery effects engines groups http3
    policy_options reader scheduling score_options
    setting tenant_file tracing
proxy.live.telemetry: alias_metrics decision_failures decision_metrics engine_metrics engine_requests exposition group_metrics handshake_metrics json_line
    leg_metrics line_writer metrics metrics_of_state predictor_metrics process_log recent_requests record
    registry request_log request_metrics shadow snapshot stages
    tenant_metrics trace trace_context trace_metrics
proxy.model_choice: arrival_rate base double_dqn environment greedy group_sim judgement plots q_network recent scenario
    scenario_file static training workload
proxy.replay: answer bodies body driver exchange faults figures fleet groups limits prompts recorder
    report sample settings sharegpt target urgency workload
proxy.sim: api decode_fleet driver engine_options entrance experiment forecast handover hints loop plots
    prefill_fleet prefix_cache recorder report service_log service_plots workload
proxy.live.tracing: export_settings exporter spans
proxy.advise: fleets miss_watch need proxy_page report
proxy.audit: energy looking observation pages plots prometheus replica report step_time verdict
proxy.validate: barrier errors fit load_log matching mirror plots timeline validation
proxy.wire: addresses body_budget caller connection_limit http1 http3 messages quic reply reply_state sse tcp_timeout
    turn_writes write_progress
proxy.wire.http1: chunked client client_connection fetch handshake heads incoming_body
    incoming_request listener pump repeated_head reply server server_connection service
proxy.wire.http3: client control_frames framing heads leaky_bucket reply server_connection server_stream
    stream_numbers
proxy.wire.quic: carrier connection endpoint stream_orders
proxy.wire.http1.client: Call Endpoint ResponseHandler
proxy.wire.http1.server: Admit Application Refuse Reply Server
topologies: CONNECTORS Command ConnectorFacts DecodeEntry EngineOptions Engines Finding GroupEntry KvFlow MAX_RANKS
    PortUse PrefillEntry RoleEngines Topology TopologyError added_group check_engines check_local_prefill check_options
    did_you_mean engine_commands known_options proxy_command read_engine_list read_topology shipped_topologies
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
    if hasattr(package, "__all__"):
        assert sorted(package.__all__) == PUBLIC[name]
        assert all(hasattr(package, one) for one in PUBLIC[name])
    else:
        found = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert sorted(found - {"testing"}) == PUBLIC[name]


def test_every_package_is_in_the_table() -> None:
    found = {
        house.module(path)
        for path in house.python_files(*house.TOP_LEVEL)
        if path.name == "__init__.py" or "\n__all__ = " in path.read_text(encoding="utf-8")
        if not path.is_relative_to(ROOT / "proxy" / "testing")
    }
    assert found == set(PUBLIC)
