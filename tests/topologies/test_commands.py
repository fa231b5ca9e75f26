"""Commands: those of the shipped topologies are stored, and every word survives a shell."""

import json
import shlex
from pathlib import Path

import pytest
from tests.topologies.engine_files import engines_of, read, text

from balanceroute.proxy.cli.topology import commands_of
from balanceroute.topologies.commands import Command, engine_commands
from balanceroute.topologies.topology import read_topology, shipped_topologies

GOLDEN = Path(__file__).parent / "golden"
REAL = [name for name in shipped_topologies() if read_topology(name).engines is not None]


def commands(folder: Path, content: str) -> tuple[Command, ...]:
    return engine_commands(engines_of(folder, content), ())


def words(command: Command) -> list[str]:
    return [word for item in command.words for word in item]


def value(command: Command, flag: str) -> str:
    all_words = words(command)
    return all_words[all_words.index(flag) + 1]


@pytest.mark.parametrize("name", REAL)
def test_the_commands_of_a_shipped_topology_are_the_stored_ones(name: str) -> None:
    rendered = "\n\n".join(command.shell() for command in commands_of(read_topology(name), name))
    stored = (GOLDEN / f"{name}.txt").read_text()
    assert f"{rendered}\n" == stored, (
        f"if it is meant so: balanceroute topology commands {name} > {GOLDEN}/{name}.txt"
    )


def test_nothing_else_is_stored() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(REAL)


def test_both_renderings_are_the_same_words_for_a_shell(tmp_path: Path) -> None:
    hard = 'a\'b "c" $HOME `x` \\ é'
    environment = f"environment = {{ HARD = {json.dumps(hard)}, EMPTY = '' }}"
    flags = f"flags = {{ chat_template = {json.dumps(hard)}, other = '-dash', seed = -1 }}"
    for command in commands(tmp_path, text(engines=f"{environment}\n{flags}")):
        expected = [
            "env",
            *(f"{key}={word}" for key, word in command.environment.items()),
            *words(command),
        ]
        assert shlex.split(command.one_line()) == expected
        assert shlex.split(command.shell().replace(" \\\n", " "), comments=True) == expected
        assert "\n" not in command.one_line()
        assert command.environment["HARD"] == value(command, "--chat-template") == hard
        assert command.environment["EMPTY"] == ""
        # A value that begins with a dash is no flag.
        assert {"--other=-dash", "--seed=-1"} <= set(words(command))


def test_a_role_goes_before_both(tmp_path: Path) -> None:
    both = "flags = { seed = 1, dtype = 'auto' }\nenvironment = { A = 1, B = 2 }"
    own = "flags = { seed = 2 }\nenvironment = { B = 3 }"
    prefill, decode = commands(tmp_path, text(engines=both, decode=own))
    assert (value(prefill, "--seed"), value(decode, "--seed")) == ("1", "2")
    assert value(decode, "--dtype") == "auto"
    assert (prefill.environment["B"], decode.environment["B"]) == ("2", "3")


def test_flags_of_every_kind(tmp_path: Path) -> None:
    flags = "flags = { on = true, off = false, many_words = ['a', 2], deep = { b = [1] } }"
    decode = commands(tmp_path, text(decode=flags))[1]
    for item in (("--on",), ("--no-off",), ("--many-words", "a", "2"), ("--deep", '{"b": [1]}')):
        assert item in decode.words


def test_external_ranks_are_servers_of_their_own(tmp_path: Path) -> None:
    decode = (
        'hosts = ["10.0.0.2", "10.0.0.3"]\ninstances = 1\ndata_parallel = 4\ntensor_parallel = 2'
    )
    found = commands(tmp_path, text(decode=f'{decode}\ndp_mode = "external"\nrpc_port = 1234'))[1:]
    assert [
        (
            command.host,
            value(command, "--port"),
            value(command, "--data-parallel-rank"),
            command.environment["CUDA_VISIBLE_DEVICES"],
        )
        for command in found
    ] == [
        ("10.0.0.2", "8200", "0", "0,1"),
        ("10.0.0.2", "8201", "1", "2,3"),
        ("10.0.0.3", "8200", "2", "0,1"),
        ("10.0.0.3", "8201", "3", "2,3"),
    ]
    # One address for the group, and one side channel base: vLLM adds the rank.
    assert {value(command, "--data-parallel-address") for command in found} == {"10.0.0.2"}
    assert {command.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for command in found} == {"5600"}


def test_internal_ranks_beyond_the_first_host_are_headless(tmp_path: Path) -> None:
    decode = 'hosts = ["10.0.0.2", "10.0.0.3"]\ninstances = 1\ndata_parallel = 4\nrpc_port = 1234'
    head, tail = commands(tmp_path, text(decode=f'{decode}\ndp_mode = "internal"'))[1:]
    assert "--data-parallel-rank" not in words(head)
    assert "--data-parallel-start-rank" not in words(head)
    assert value(head, "--data-parallel-size-local") == "2"
    assert "--headless" in words(tail)
    assert "--port" not in words(tail)
    assert value(tail, "--data-parallel-start-rank") == "2"
    assert value(tail, "--data-parallel-address") == "10.0.0.2"
    assert (head.environment["CUDA_VISIBLE_DEVICES"], tail.host) == ("0,1", "10.0.0.3")


def test_a_supervisor_serves_all_ranks_of_its_host_at_ports_of_their_own(tmp_path: Path) -> None:
    decode = 'hosts = ["10.0.0.2", "10.0.0.3"]\ninstances = 1\ndata_parallel = 4\nrpc_port = 1234'
    supervised = f'{decode}\ndp_mode = "supervised"\nsupervisor_port = 9256'
    topology = read(tmp_path, text(decode=supervised))
    assert topology.engines is not None
    head, tail = engine_commands(topology.engines, ())[1:]
    for command, start_rank in ((head, None), (tail, "2")):
        assert value(command, "--port") == "8200"
        assert value(command, "--data-parallel-size-local") == "2"
        assert value(command, "--data-parallel-supervisor-port") == "9256"
        assert value(command, "--data-parallel-address") == "10.0.0.2"
        assert ("--data-parallel-multi-port-external-lb",) in command.words
        assert {"--headless", "--data-parallel-rank"}.isdisjoint(words(command))
        starts = [item[1] for item in command.words if item[0] == "--data-parallel-start-rank"]
        assert starts == ([start_rank] if start_rank else [])
        assert command.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert [(entry.url, entry.rank_ids) for entry in topology.decode] == [
        (f"http://10.0.0.{host}:{port}", None) for host in (2, 3) for port in (8200, 8201)
    ]


def test_instances_on_one_host_have_ports_and_devices_of_their_own(tmp_path: Path) -> None:
    prefill = 'instances = 2\ntensor_parallel = 2\ndata_parallel = 2\ndp_mode = "external"'
    found = commands(tmp_path, text(prefill=f"{prefill}\nrpc_port = 900"))[:4]
    assert [value(command, "--port") for command in found] == ["8100", "8101", "8102", "8103"]
    assert [value(c, "--data-parallel-rpc-port") for c in found] == ["900", "900", "901", "901"]
    assert [c.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for c in found] == [
        "5600",
        "5600",
        "5602",
        "5602",
    ]
    assert [c.environment["CUDA_VISIBLE_DEVICES"] for c in found] == ["0,1", "2,3", "4,5", "6,7"]


def test_the_lease_is_what_each_connector_calls_it(tmp_path: Path) -> None:
    for connector in ("nixl", "mooncake", "mooncake-ascend"):
        prefill = commands(tmp_path, text(connector, engines="lease_s = 90"))[0]
        extra = json.loads(value(prefill, "--kv-transfer-config"))
        lease_s = extra.get("kv_connector_extra_config", {}).get("kv_lease_duration")
        aborts = prefill.environment.get("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT")
        assert (lease_s, aborts) == ((90, None) if connector == "nixl" else (None, "90"))


def test_ascend_engines_are_told_of_each_other(tmp_path: Path) -> None:
    engines = 'interface = "eth1"'
    decode = "recompute_scheduler = true\nadditional = { scheduler_config = { x = 1 } }"
    found = commands(tmp_path, text("mooncake-layerwise", engines=engines, decode=decode))
    for command in found:
        config = json.loads(value(command, "--kv-transfer-config"))
        assert config["kv_connector"] == "MooncakeLayerwiseConnector"
        assert config["kv_port"] == 36000
        assert command.environment["HCCL_IF_IP"] == command.host
        assert command.environment["HCCL_SOCKET_IFNAME"] == "eth1"
    assert json.loads(value(found[1], "--additional-config")) == {
        "scheduler_config": {"x": 1},
        "recompute_scheduler_enable": True,
    }


def test_stages_of_a_rank_have_devices_and_ports_of_their_own(tmp_path: Path) -> None:
    prefill = "instances = 2\ntensor_parallel = 2\npipeline_parallel = 2"
    transfer = "{ kv_connector_extra_config = { prefill = { pp_layer_partition = '30,31' } } }"
    content = text("mooncake-ascend", prefill=f"{prefill}\nkv_transfer = {transfer}")
    first, second, decode = commands(tmp_path, content)
    assert value(first, "--pipeline-parallel-size") == "2"
    assert "--pipeline-parallel-size" not in words(decode)
    visible = [c.environment["ASCEND_RT_VISIBLE_DEVICES"] for c in (first, second)]
    assert visible == ["0,1,2,3", "4,5,6,7"]
    configs = [json.loads(value(c, "--kv-transfer-config")) for c in (first, second, decode)]
    assert [config["kv_port"] for config in configs] == [36000, 36004, 36000]
    sizes = {"dp_size": 1, "tp_size": 2, "pp_size": 2}
    assert configs[0]["kv_connector_extra_config"] == {
        "prefill": sizes | {"pp_layer_partition": "30,31"},
        "decode": {"dp_size": 1, "tp_size": 1},
    }
    assert configs[2]["kv_connector_extra_config"]["prefill"] == sizes


@pytest.mark.parametrize(
    ("connector", "parallel"),
    [
        ("nixl", "tensor_parallel = 16"),
        ("mooncake", "tensor_parallel = 8\npipeline_parallel = 2"),
        ("mooncake-hybrid", "tensor_parallel = 8\npipeline_parallel = 2"),
    ],
)
def test_a_rank_on_several_hosts_is_one_process_on_each(
    connector: str, parallel: str, tmp_path: Path
) -> None:
    hosts = f'hosts = ["10.0.0.1", "10.0.0.3"]\ninstances = 1\nmaster_port = 29600\n{parallel}'
    topology = read(tmp_path, text(connector, prefill=hosts))
    assert topology.engines is not None
    head, tail = engine_commands(topology.engines, ())[:2]
    for rank, command in enumerate((head, tail)):
        assert value(command, "--nnodes") == "2"
        assert value(command, "--node-rank") == str(rank)
        assert value(command, "--master-addr") == "10.0.0.1"
        assert value(command, "--master-port") == "29600"
        devices = [v for k, v in command.environment.items() if k.endswith("VISIBLE_DEVICES")]
        assert devices == ["0,1,2,3,4,5,6,7"]
    assert (tail.host, "--headless" in words(tail)) == ("10.0.0.3", True)
    assert {"--port", "--host"}.isdisjoint(words(tail))
    assert [entry.url for entry in topology.prefill] == ["http://10.0.0.1:8100"]
    # Its workers register at the bootstrap server of the first host.
    ports = {c.environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") for c in (head, tail)}
    assert ports == {"8998" if connector == "mooncake" else None}


def test_a_store_stands_beside_the_connector_that_transfers(tmp_path: Path) -> None:
    engines = (
        "kv_store = { kv_connector = 'Store', kv_connector_extra_config = { a = 1 } }\n"
        "kv_transfer = { kv_load_failure_policy = 'fail', kv_buffer_device = 'cuda' }\n"
        "lease_s = 90"
    )
    own = "kv_store = { kv_connector_extra_config = { a = 2 } }"
    for command in commands(tmp_path, text(engines=engines, decode=own)):
        role = ("kv_producer", "kv_consumer")[command.role == "decode"]
        extra = {"a": 1 + (command.role == "decode")}
        lease = {"kv_lease_duration": 90}
        nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cuda"}
        store = {"kv_connector": "Store", "kv_role": role, "kv_connector_extra_config": extra}
        connectors = [nixl | {"kv_connector_extra_config": lease}, store]
        assert json.loads(value(command, "--kv-transfer-config")) == {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"connectors": connectors},
        }


def test_a_host_that_is_a_name_is_not_told_as_an_address(tmp_path: Path) -> None:
    prefill = commands(tmp_path, text(prefill='hosts = ["p0.local"]'))[0]
    assert "VLLM_HOST_IP" not in prefill.environment
    assert value(prefill, "--host") == "p0.local"
