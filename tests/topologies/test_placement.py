"""Placement: every rank runs once, on devices and ports of its own."""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from balanceroute.topologies.checks import check_engines
from balanceroute.topologies.connector_facts import CONNECTORS
from balanceroute.topologies.engines import DP_MODES, Engines, Role, RoleEngines
from balanceroute.topologies.placement import place

NOTHING: MappingProxyType[str, str] = MappingProxyType({})


@st.composite
def roles(draw: st.DrawFn, role: Role) -> RoleEngines:
    per_host = draw(st.integers(1, 3))
    span = draw(st.integers(1, 3)) if per_host == 1 else 1
    heads = draw(st.integers(1, 3))
    hosts = tuple(f"{role}{i}" for i in range(heads * span))
    over_hosts = span > 1 and draw(st.booleans())
    data_parallel = 1 if over_hosts else span * draw(st.integers(1, 3))
    several = data_parallel > 1
    # A supervisor takes two ranks or more.
    modes = DP_MODES if data_parallel >= 2 * span else DP_MODES[:2]
    dp_mode = draw(st.sampled_from(modes)) if several else None
    return RoleEngines(
        role=role,
        hosts=hosts,
        instances=heads * per_host,
        port=8000,
        tensor_parallel=draw(st.sampled_from([1, 2, 4])) * (span if over_hosts else 1),
        pipeline_parallel=draw(st.integers(1, 3)) if role == "prefill" else 1,
        data_parallel=data_parallel,
        dp_mode=dp_mode,
        rpc_port=39_000 if several else None,
        master_port=39_700 if over_hosts else None,
        supervisor_port=39_500 if dp_mode == "supervised" else None,
        max_num_seqs=8,
        max_num_batched_tokens=None,
        gpu_memory_utilization=None,
        kv_port=40_000,
        recompute_scheduler=True,
        compilation=NOTHING,
        additional=NOTHING,
        kv_transfer=NOTHING,
        kv_store=NOTHING,
        flags=NOTHING,
        environment=NOTHING,
    )


@st.composite
def fleets(draw: st.DrawFn) -> Engines:
    connector = draw(st.sampled_from(sorted(CONNECTORS)))
    prefill, decode = draw(roles("prefill")), draw(roles("decode"))
    npu = CONNECTORS[connector].devices == ("npu",)
    if connector == "mooncake":
        decode = replace(decode, kv_port=None)
    return Engines(
        weights="w",
        connector=connector,
        device="npu" if npu else "cuda",
        version=None,
        devices_per_host=10_000 if not npu else 15,
        proxy_host="proxy",
        interface=None,
        lease_s=None,
        max_model_len=None,
        block_size=None,
        prefill=prefill,
        decode=decode,
    )


@given(fleets())
def test_every_rank_runs_once(engines: Engines) -> None:
    processes = place(engines)
    assert len({process.name for process in processes}) == len(processes)
    for role in engines.roles:
        ranks = Counter(
            (process.instance, rank)
            for process in processes
            if process.role is role and process.node == 0
            for rank in process.ranks
        )
        assert ranks == Counter(
            (i, rank) for i in range(role.instances) for rank in range(role.data_parallel)
        )
        shares = Counter(
            process.host for process in processes if process.role is role for _ in process.ranks
        )
        # Hosts of a role are alike, so none has more ranks than another.
        assert shares.keys() == set(role.hosts)
        assert len(set(shares.values())) == 1


@given(fleets())
def test_ranks_have_devices_of_their_own(engines: Engines) -> None:
    used = Counter[tuple[str, int]]()
    for process in place(engines):
        of_ranks = len(process.ranks) * process.role.devices_per_rank
        assert len(process.devices) == of_ranks // process.role.hosts_per_rank
        used.update((process.host, device) for device in process.devices)
    assert set(used.values()) == {1}


@given(fleets())
def test_every_instance_has_one_head_and_a_url(engines: Engines) -> None:
    processes = place(engines)
    heads = {
        (process.role.role, process.instance): process.host
        for process in processes
        if process.ranks.start == 0 and process.node == 0
    }
    for process in processes:
        assert process.head == heads[process.role.role, process.instance]
        match process.role.dp_mode:
            case "internal":
                assert len(process.urls) == (process.ranks.start == 0)
            case _:
                assert len(process.urls) == len(process.ranks) * (process.node == 0)


@given(fleets())
def test_a_role_never_clashes_with_itself(engines: Engines) -> None:
    clashes = [finding for finding in check_engines(engines) if "would listen" in finding.reason]
    assert not clashes
