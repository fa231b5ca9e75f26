"""`[engines]`: read whole or refused with its key; addresses and the proxy's settings follow."""

from pathlib import Path

import pytest
from tests.topologies.engine_files import read, text

from balanceroute.topologies import TopologyError
from balanceroute.topologies.topology import DecodeEntry, PrefillEntry


def test_addresses_follow_from_the_engines(tmp_path: Path) -> None:
    topology = read(
        tmp_path,
        text(
            prefill='hosts = ["10.0.0.1", "p2"]\ninstances = 4',
            decode='data_parallel = 4\ndp_mode = "external"\nrpc_port = 1234',
        ),
    )
    assert topology.prefill == tuple(
        PrefillEntry(f"http://{place}")
        for place in ("10.0.0.1:8100", "10.0.0.1:8101", "p2:8100", "p2:8101")
    )
    assert topology.decode == tuple(DecodeEntry(f"http://10.0.0.2:820{i}") for i in range(4))


def test_internal_ranks_share_an_address(tmp_path: Path) -> None:
    decode = 'hosts = ["::1", "::2"]\ninstances = 1\ndata_parallel = 4\ndp_mode = "internal"'
    topology = read(tmp_path, text(decode=f"{decode}\nrpc_port = 1234"))
    assert topology.decode == (DecodeEntry("http://[::1]:8200", rank_ids=(0, 1, 2, 3)),)


def test_mooncake_prefillers_have_bootstrap_servers(tmp_path: Path) -> None:
    topology = read(tmp_path, text("mooncake", prefill="instances = 2"))
    assert [entry.bootstrap for entry in topology.prefill] == [
        "http://10.0.0.1:8998",
        "http://10.0.0.1:8999",
    ]


def test_the_proxy_follows_the_engines_unless_told(tmp_path: Path) -> None:
    topology = read(tmp_path, text(engines="lease_s = 60"))
    assert topology.proxy == {"batch": 16, "lease_s": 60}
    top = "[proxy]\nbatch = 8\nport = 81"
    topology = read(tmp_path, text(top=top, engines="lease_s = 60"))
    assert topology.proxy == {"batch": 8, "lease_s": 60, "port": 81}


def test_addresses_beside_the_engines_must_agree(tmp_path: Path) -> None:
    same = '[[decode]]\nurl = "http://10.0.0.2:8200"'
    assert read(tmp_path, text(top=same)) == read(tmp_path, text())
    with pytest.raises(TopologyError, match=r"comes to: http://10\.0\.0\.1:8100; leave it out"):
        read(tmp_path, text(top='[[prefill]]\nurl = "http://10.0.0.1:8101"'))


RANKS = "data_parallel = 4"
FULL = f'{RANKS}\ndp_mode = "external"\nrpc_port = 1234'
SUPERVISED = f'{RANKS}\ndp_mode = "supervised"\nrpc_port = 1234\nsupervisor_port = 9256'


@pytest.mark.parametrize(
    ("content", "key", "reason"),
    [
        (text(engines="weight = 1"), "engines.weight", "did you mean 'weights'?"),
        (text(engines='weights = ""'), "engines.weights", "must be a text"),
        (text(engines='device = "tpu"'), "engines.device", "did you mean 'npu'?"),
        (text(engines='device = "npu"'), "engines.device", "nixl needs cuda or cpu"),
        (
            text("mooncake-ascend", engines='device = "cuda"'),
            "engines.device",
            "connector mooncake-ascend needs npu",
        ),
        (text(engines='device = "cpu"'), "engines.devices_per_host", "means nothing with device"),
        (text(engines="devices_per_host = 0"), "engines.devices_per_host", "from 1 to 1024"),
        (text(engines="lease_s = 5"), "engines.lease_s", "from 6"),
        (text(engines="lease_s = 6.5"), "engines.lease_s", "must be an integer"),
        (text("mooncake-layerwise", engines="lease_s = 60"), "engines.lease_s", "means nothing"),
        (text(prefill='hosts = ["a", "a"]'), "engines.prefill.hosts", "names 'a' twice"),
        (text(prefill='hosts = ["a b"]'), "engines.prefill.hosts", "neither a name nor an address"),
        (text(prefill="hosts = []"), "engines.prefill.hosts", "is missing"),
        (text(prefill="port = 65536"), "engines.prefill.port", "from 1 to 65535"),
        (text(prefill="max_num_seqs = true"), "engines.prefill.max_num_seqs", "must be an integer"),
        (text(prefill="dp_mode = 1"), "engines.prefill.dp_mode", "must be a text"),
        (text(prefill='dp_mode = "external"'), "engines.prefill.dp_mode", "data_parallel = 1"),
        (text(decode=RANKS), "engines.decode.dp_mode", "data_parallel = 4 needs it"),
        (
            text(decode=f'{RANKS}\ndp_mode = "external"'),
            "engines.decode.rpc_port",
            "data_parallel = 4 needs it",
        ),
        (
            text(decode=f'{RANKS}\ndp_mode = "hybrid"\nrpc_port = 1'),
            "engines.decode.dp_mode",
            "known: external, internal, supervised",
        ),
        (
            text(decode=f'{RANKS}\ndp_mode = "supervised"\nrpc_port = 1'),
            "engines.decode.supervisor_port",
            "is missing: it needs one with dp_mode = 'supervised'",
        ),
        (
            text(decode=f"{FULL}\nsupervisor_port = 9256"),
            "engines.decode.supervisor_port",
            "means nothing with dp_mode",
        ),
        (
            text(decode=f'{SUPERVISED}\nhosts = ["a", "b", "c", "d"]\ninstances = 1'),
            "engines.decode.data_parallel",
            "two ranks or more on each host",
        ),
        (
            text(decode=f'{FULL}\nhosts = ["a", "b", "c"]\ninstances = 1'),
            "engines.decode.data_parallel",
            "is 4, must share out evenly over an instance's 3 hosts",
        ),
        (
            text(decode='hosts = ["a", "b", "c"]\ninstances = 2'),
            "engines.decode.instances",
            "is 2, must be a multiple or a divisor of the number of hosts (3)",
        ),
        (
            text(prefill="pipeline_parallel = 2"),
            "engines.prefill.pipeline_parallel",
            "nixl transfers no KV caches of several stages, mooncake, mooncake-ascend, moon",
        ),
        (
            text("mooncake-ascend", decode="pipeline_parallel = 2"),
            "engines.decode.pipeline_parallel",
            "is 2: a decode rank has one stage",
        ),
        (
            text(prefill='hosts = ["a", "b"]\ninstances = 1\ntensor_parallel = 2'),
            "engines.prefill.master_port",
            "is missing: a rank is on several hosts",
        ),
        (
            text(prefill='hosts = ["a", "b"]\ninstances = 1\nmaster_port = 1'),
            "engines.prefill.tensor_parallel",
            "comes to 1 devices, must share out evenly over a rank's 2 hosts",
        ),
        (text(prefill="master_port = 1"), "engines.prefill.master_port", "is on one host"),
        (
            text(engines="kv_store = { kv_connector_extra_config = { a = 1 } }"),
            "engines.kv_store.kv_connector",
            "is missing: it names the connector",
        ),
        (
            text(decode="kv_store = { kv_connector = 'NixlConnector' }"),
            "engines.decode.kv_store.kv_connector",
            "connector transfers the KV caches",
        ),
        (
            text(engines="kv_store = { engine_id = 'x' }"),
            "engines.kv_store.engine_id",
            "each engine makes its own",
        ),
        (text(prefill="kv_port = 1"), "engines.prefill.kv_port", "means nothing here"),
        (text("mooncake", decode="bootstrap_port = 1"), "engines.decode.bootstrap_port", "nothing"),
        (
            text("mooncake").replace("bootstrap_port = 8998", ""),
            "engines.prefill.bootstrap_port",
            "is missing: connector mooncake needs it",
        ),
        (
            text("mooncake-ascend").replace("kv_port = 36000", ""),
            "engines.prefill.kv_port",
            "is missing",
        ),
        (
            text("mooncake-ascend", prefill="recompute_scheduler = true"),
            "engines.prefill.recompute_scheduler",
            "unknown key",
        ),
        (
            text(decode="recompute_scheduler = true"),
            "engines.decode.recompute_scheduler",
            "is vllm-ascend's",
        ),
        (
            text("mooncake-ascend", decode="additional = { recompute_scheduler_enable = true }"),
            "engines.decode.additional",
            "write the role's recompute_scheduler",
        ),
        (text(decode="flags = { port = 1 }"), "engines.decode.flags.port", "write the role's port"),
        (text(decode="flags = { api_key = 'x' }"), "engines.decode.flags.api_key", "secrets"),
        (text(decode="flags = { '--x' = 1 }"), "engines.decode.flags.--x", "is no name"),
        (text(decode="flags = { x = [] }"), "engines.decode.flags.x", "must be a plain value"),
        (text(decode="flags = { x = [true] }"), "engines.decode.flags.x", "texts or numbers"),
        (text(decode="environment = { A = true }"), "engines.decode.environment.A", "a text or an"),
        (
            text(decode="environment = { VLLM_HOST_IP = '::1' }"),
            "engines.decode.environment.VLLM_HOST_IP",
            "each host's own address",
        ),
        (
            text(engines="kv_transfer = { kv_role = 'kv_both' }"),
            "engines.kv_transfer.kv_role",
            "it follows from the role",
        ),
        (
            text(decode=f"{FULL}\nport = 65533"),
            "engines.decode.port",
            "comes to 65536 for decode-3, beyond 65535",
        ),
        (text().replace('connector = "nixl"', ""), "connector", "[engines] needs it"),
        (text(top="[emulation]\nranks = 1"), "emulation", "in place of [engines]"),
    ],
)
def test_bad_engines_are_refused_with_their_key(
    content: str, key: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(TopologyError) as refused:
        read(tmp_path, content)
    assert refused.value.key == key
    assert reason in refused.value.reason
