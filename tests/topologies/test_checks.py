"""What is wrong with a topology that could be read: said with its key, and status 2."""

from pathlib import Path

import pytest
from tests.topologies.engine_files import read, text

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.topology import check_topology
from balanceroute.topologies.topology import read_topology, shipped_topologies

GROUP = 'data_parallel = 4\ndp_mode = "external"\nrpc_port = 1234'
DRAFT = "flags = { speculative_config = { method = 'mtp', num_speculative_tokens = 3 } }"
SUPERVISED = 'data_parallel = 4\ndp_mode = "supervised"\nrpc_port = 1234'
STORE = "instances = 2\nkv_store = { kv_connector = 'AscendStoreConnector'"
PUTS = "kv_connector_extra_config = { consumer_is_to_put = true }"
SAME_HOST = 'hosts = ["10.0.0.1"]'


def found(folder: Path, content: str) -> list[str]:
    return [str(finding) for finding in check_topology(read(folder, content))]


@pytest.mark.parametrize("name", shipped_topologies())
def test_nothing_is_wrong_with_the_shipped_topologies(name: str) -> None:
    assert not list(check_topology(read_topology(name)))


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake-layerwise"])
def test_nothing_is_wrong_with_the_smallest(connector: str, tmp_path: Path) -> None:
    assert found(tmp_path, text(connector, top='[proxy]\nhost = "10.0.0.9"')) == []


@pytest.mark.parametrize(
    ("content", "key", "reason"),
    [
        (
            text(decode=f"{SAME_HOST}\nport = 8100\nside_channel_port = 5700"),
            "engines.decode.port",
            "decode-0's API would listen on 10.0.0.1:8100, where prefill-0's API has 8100",
        ),
        (
            text(decode=f"{SAME_HOST}\n{GROUP}", prefill="side_channel_port = 5603"),
            "engines.decode.side_channel_port",
            "decode-3's connector would listen on 10.0.0.1:5603",
        ),
        (
            text(decode=f"{GROUP}\nport = 1231"),
            "engines.decode.port",
            "decode-3's API would listen on 10.0.0.2:1234, where decode-0's RPC has 1234",
        ),
        (
            text(decode=f"{SUPERVISED}\nsupervisor_port = 8203"),
            "engines.decode.supervisor_port",
            "decode-0's supervisor would listen on 10.0.0.2:8203, where decode-0's API has 8200-8203",
        ),
        (
            text(top="[proxy]\nport = 8100\nhost = '10.0.0.1'", engines='proxy_host = "10.0.0.1"'),
            "proxy.port",
            "the proxy would listen on 10.0.0.1:8100, where prefill-0's API has 8100",
        ),
        (
            text(prefill="port = 9000", engines='proxy_host = "10.0.0.1"'),
            "proxy.admin_port",
            "administration would listen on 10.0.0.1:9000, where prefill-0's API",
        ),
        (
            text(
                "mooncake-ascend",
                prefill="tensor_parallel = 4",
                decode="kv_port = 65535\ntensor_parallel = 4",
            ),
            "engines.decode.kv_port",
            "comes to 65535-65538 for decode-0's connector, beyond 65535",
        ),
        (
            text("mooncake-ascend", prefill="tensor_parallel = 4", decode=f"{SAME_HOST}"),
            "engines.decode.kv_port",
            "decode-0's connector would listen on 10.0.0.1:36000, where prefill-0's connector has "
            "36000-36003",
        ),
        (
            text("mooncake-ascend", prefill="kv_port = 27998\ntensor_parallel = 4"),
            "engines.prefill.kv_port",
            "listen on 27998-28001: Mooncake's AscendDirectTransport takes ports at random, 20000-27999",
        ),
        (
            text("mooncake-layerwise", decode="port = 20000"),
            "engines.decode.port",
            "AscendDirectTransport takes ports",
        ),
        (
            text("mooncake-ascend", prefill="port = 60015"),
            "engines.prefill.port",
            "listen on 60015: HCCL of prefill (HCCL_IF_BASE_PORT) takes 60000-60015",
        ),
        (
            text(
                "mooncake-ascend",
                engines="environment = { HCCL_IF_BASE_PORT = 45000 }",
                decode="kv_port = 44999\nenvironment = { HCCL_HOST_SOCKET_PORT_RANGE = '50000' }",
                prefill="kv_port = 44999\ntensor_parallel = 2",
            ),
            "engines.prefill.kv_port",
            "listen on 44999-45000: HCCL of prefill (HCCL_IF_BASE_PORT) takes 45000-45015",
        ),
        (
            text(decode="flags = { kv_cache_dtype = 'fp8' }"),
            "engines.decode.flags.kv_cache_dtype",
            "is 'fp8', but prefill's is 'auto': the KV caches differ",
        ),
        (
            text(prefill="flags = { quantization = 'fp8' }"),
            "engines.decode.flags.quantization",
            "is 'auto', but prefill's is 'fp8'",
        ),
        (
            text(decode=DRAFT),
            "engines.decode.flags.speculative_config",
            "has method 'mtp', but prefill's None",
        ),
        (
            text(engines=DRAFT, decode="max_num_batched_tokens = 63"),
            "engines.decode.max_num_batched_tokens",
            "is 63, less than 64: each of max_num_seqs (16) takes one token and 3 drafted ones",
        ),
        (
            text(decode=f"{GROUP}\ntensor_parallel = 4"),
            "engines.devices_per_host",
            "is 8, but the engines on 10.0.0.2 need 16",
        ),
        (
            text("mooncake-ascend", prefill="tensor_parallel = 2", decode="tensor_parallel = 4"),
            "engines.prefill.tensor_parallel",
            "is 2: vllm-ascend needs a multiple of decode's (4)",
        ),
        (
            text(prefill="tensor_parallel = 3", decode="tensor_parallel = 2"),
            "engines.prefill.tensor_parallel",
            "must be a multiple or a divisor of decode's (2)",
        ),
        (
            text(decode="max_num_batched_tokens = 15"),
            "engines.decode.max_num_batched_tokens",
            "is 15, less than one token for each of max_num_seqs (16)",
        ),
        (
            text("mooncake", prefill=GROUP),
            "engines.prefill.data_parallel",
            "bootstrap server for its rank 0 alone",
        ),
        (
            text("mooncake-hybrid", prefill="flags = { decode_context_parallel_size = 2 }"),
            "engines.prefill.flags.decode_context_parallel_size",
            "is 2: mooncake-hybrid has no context parallelism",
        ),
        (
            text("mooncake-hybrid", engines='version = "0.23.0"', prefill="pipeline_parallel = 2"),
            "engines.prefill.pipeline_parallel",
            "is 2: MooncakeHybridConnector of vllm-ascend 0.23.0 ends at its start",
        ),
        (
            text("mooncake-ascend", prefill=f"{STORE} }}\nenvironment = {{ PYTHONHASHSEED = 0 }}"),
            "engines.prefill.kv_store",
            "gives prefill-1 the lookup_rpc_port 0 of prefill-0 on 10.0.0.1",
        ),
        (
            text(prefill="kv_store = { kv_connector = 'MooncakeStoreConnector' }"),
            "engines.prefill.environment",
            "lacks PYTHONHASHSEED",
        ),
        (
            text(
                "mooncake-ascend",
                prefill="pipeline_parallel = 2",
                decode=f"{STORE.replace('instances = 2', '')}, {PUTS} }}\nenvironment = {{ PYTHONHASHSEED = 0 }}",
            ),
            "engines.decode.kv_store",
            "needs prefill_pp_size = 2 with consumer_is_to_put",
        ),
        (
            text(decode='hosts = ["127.0.0.1"]'),
            "engines",
            "127.0.0.1 is reached from no other host, and there are others (10.0.0.1)",
        ),
        (text(top="[proxy]\nbatch = 17"), "proxy.batch", "is 17, more than a decode rank's"),
        (
            text(top="[proxy]\nlease_s = 61", engines="lease_s = 60"),
            "proxy.lease_s",
            "is 61, but prefillers free KV caches after 60 s",
        ),
        (
            text(top="[proxy]\nlease_s = inf", engines="lease_s = 60"),
            "proxy.lease_s",
            "is inf, but prefillers",
        ),
        (text(top="[proxy]\npolcy = 'br-0'"), "[proxy].polcy", "did you mean 'policy'?"),
        (
            text("mooncake-layerwise", top="[proxy]\nhost = '0.0.0.0'"),
            "[proxy].host",
            "needs --metaserver-url",
        ),
        ('name = "x"\n[emulation]\nrank = 1', "[emulation].rank", "did you mean 'ranks'?"),
    ],
)
def test_what_cannot_work_is_an_error(
    content: str, key: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = found(tmp_path, content)
    errors = [line for line in findings if line.startswith("error: ")]
    assert len(errors) == 1, findings
    assert errors[0].removeprefix("error: ").startswith(key)
    assert reason in errors[0]
    path = tmp_path / "fleet.toml"
    assert main(["topology", "check", str(path)]) == 2
    assert f"{path}: {errors[0]}" in capsys.readouterr().out.splitlines()


PARSED = "flags = { reasoning_parser = 'qwen3', "


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (text(top="[proxy]\nbatch = 15\nhost = '::'\n"), "proxy.batch"),
        (text(top="[proxy]\nprobe_limit = 9\nhost = '::'\n"), "proxy.probe_limit"),
        (text(), "proxy.host"),
        (
            text("mooncake-ascend", top="[proxy]\nhost = '::'"),
            "engines.decode.recompute_scheduler",
        ),
        (
            text(
                "mooncake-hybrid",
                top="[proxy]\nhost = '::'",
                prefill="flags = { disable_hybrid_kv_cache_manager = false }",
                decode="recompute_scheduler = true",
            ),
            "engines.decode.flags.disable_hybrid_kv_cache_manager",
        ),
        (text(top="[proxy]\nhost = '::'", engines="lease_s = 8"), "proxy.lease_s"),
        (
            text(
                top="[proxy]\nhost = '::'",
                decode=f'{GROUP}\nhosts = ["10.0.0.2", "10.0.0.3"]\ninstances = 1',
            ),
            "engines.interface",
        ),
        (
            text(
                "mooncake-layerwise",
                top="[proxy]\nhost = '10.0.0.9'",
                decode=f"{SAME_HOST}\nkv_port = 36100",
            ),
            "engines.prefill.environment",
        ),
        (
            text(top="[proxy]\nhost = '::'", decode=PARSED + "stream_interval = 4 }"),
            "engines.decode.flags.stream_interval",
        ),
        (
            text(top="[proxy]\nhost = '::'", decode=f"{GROUP}\ninstances = 2"),
            "engines.decode.instances",
        ),
    ],
)
def test_what_may_be_meant_so_is_a_note(
    content: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line.split(": ")[:2] for line in found(tmp_path, content)] == [["note", key]]
    assert main(["topology", "check", str(tmp_path / "fleet.toml")]) == 0
    assert "nothing is wrong with it: " in capsys.readouterr().out


def test_roles_may_draft_different_numbers_of_tokens(tmp_path: Path) -> None:
    more = DRAFT.replace("tokens = 3", "tokens = 1")
    assert not found(tmp_path, text(top="[proxy]\nhost = '::'", prefill=more, decode=DRAFT))


def test_a_range_that_clashes_often_is_told_once(tmp_path: Path) -> None:
    decode = f"{SAME_HOST}\n{GROUP}\nport = 8100\nside_channel_port = 5700"
    findings = found(tmp_path, text(prefill="instances = 4", decode=decode))
    assert [line.split(": ")[:2] for line in findings] == [["error", "engines.decode.port"]]


def test_tokens_that_the_engine_counts_may_be_merged(tmp_path: Path) -> None:
    content = text(top="[proxy]\nhost = '::'", decode="flags = { stream_interval = 4 }")
    assert not found(tmp_path, content)


FEW = "recompute_scheduler = true\nmax_num_batched_tokens = 256"


@pytest.mark.parametrize("connector", ["mooncake-ascend", "mooncake-layerwise"])
@pytest.mark.parametrize(
    ("direct", "decode", "dies"),
    [
        ("decode", FEW, True),
        ("decode", f"{FEW}\nadditional = {{ mlapo_keep_prefill_weights = false }}", True),
        ("decode", f"{FEW}\nenvironment = {{ VLLM_ASCEND_ENABLE_MLAPO = '1' }}", True),
        ("decode", f"{FEW}\nadditional = {{ mlapo_keep_prefill_weights = true }}", False),
        ("decode", f"{FEW}\nadditional = {{ enable_mlapo = false }}", False),
        ("decode", f"{FEW}\nenvironment = {{ VLLM_ASCEND_ENABLE_MLAPO = 0 }}", False),
        ("decode", "recompute_scheduler = true\nmax_num_batched_tokens = 1025", False),
        ("decode", "recompute_scheduler = true", False),
        ("prefill", FEW, False),
        ("auto", FEW, False),
        ("refuse", FEW, False),
    ],
)
def test_a_rank_without_the_weights_for_prompts_is_sent_none(
    connector: str, direct: str, decode: str, dies: bool, tmp_path: Path
) -> None:
    """A decode rank whose weights MLAPO freed dies of a prompt."""
    top = f"[proxy]\ndirect = '{direct}'\nhost = '10.0.0.9'"
    findings = found(tmp_path, text(connector, top=top, decode=decode))
    if dies:
        assert len(findings) == 1, findings
        assert findings[0].startswith("error: engines.decode.additional: lacks mlapo_keep")
    else:
        assert findings == []


@pytest.mark.parametrize("name", ["ascend-2p1d", "ascend-4p1d", "ascend-5p1d"])
def test_the_shipped_layouts_of_mla_models_keep_the_weights(name: str) -> None:
    engines = read_topology(name).engines
    assert engines is not None
    assert engines.decode.additional["mlapo_keep_prefill_weights"] is True
