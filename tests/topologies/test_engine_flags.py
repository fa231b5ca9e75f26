"""The engines know the flags: real vLLM's parser for GPUs and CPUs, a documented list for Ascend."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from balanceroute.topologies import Command, engine_commands, read_topology, shipped_topologies

# An interpreter with vLLM; its parser needs no accelerator.
PYTHON = "BALANCEROUTE_VLLM_PYTHON"
PARSE = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(arguments)
    engine = AsyncEngineArgs.from_cli_args(arguments)
    transfer = engine.kv_transfer_config
    print(json.dumps([
        arguments.port, engine.data_parallel_size, engine.data_parallel_rank, engine.max_num_seqs,
        transfer.kv_connector, transfer.kv_role, transfer.kv_load_failure_policy,
    ]))
"""
_TUTORIALS = "https://docs.vllm.ai/projects/ascend/en/latest/tutorials"
_PD = f"{_TUTORIALS}/features/pd_disaggregation_mooncake_multi_node.html"
_CONFIG = (
    "https://docs.vllm.ai/projects/ascend/en/latest/user_guide/configuration/additional_config.html"
)
_DP = "https://docs.vllm.ai/en/latest/serving/data_parallel_deployment.html"
ASCEND_FLAGS = {
    "--additional-config": _PD,
    "--compilation-config": _PD,
    "--data-parallel-address": _PD,
    "--data-parallel-rank": _PD,
    "--data-parallel-rpc-port": _PD,
    "--data-parallel-size": _PD,
    "--data-parallel-size-local": _DP,
    "--data-parallel-start-rank": _DP,
    "--enable-expert-parallel": _PD,
    "--enforce-eager": _PD,
    "--gpu-memory-utilization": _PD,
    "--headless": _DP,
    "--host": _PD,
    "--kv-transfer-config": _PD,
    "--max-model-len": _PD,
    "--max-num-batched-tokens": _PD,
    "--max-num-seqs": _PD,
    "--no-enable-prefix-caching": _PD,
    "--port": _PD,
    "--quantization": _PD,
    "--seed": _PD,
    "--served-model-name": _PD,
    "--tensor-parallel-size": _PD,
    "--trust-remote-code": _PD,
}
ASCEND_ADDITIONAL = {
    "enable_shared_expert_dp": _CONFIG,
    "mlapo_keep_prefill_weights": _CONFIG,
    "multistream_overlap_shared_expert": _CONFIG,
    "scheduler_config": _CONFIG,
}
ASCEND_ENVIRONMENT = {
    "ASCEND_RT_VISIBLE_DEVICES": _PD,
    "GLOO_SOCKET_IFNAME": _PD,
    "HCCL_BUFFSIZE": _PD,
    "HCCL_CONNECT_TIMEOUT": f"{_TUTORIALS}/models/DeepSeek-V3.1.html",
    "HCCL_EXEC_TIMEOUT": f"{_TUTORIALS}/models/DeepSeek-V3.1.html",
    "HCCL_IF_IP": _PD,
    "HCCL_OP_EXPANSION_MODE": _PD,
    "HCCL_SOCKET_IFNAME": _PD,
    "OMP_NUM_THREADS": _PD,
    "OMP_PROC_BIND": _PD,
    "PYTORCH_NPU_ALLOC_CONF": _PD,
    "TASK_QUEUE_ENABLE": _PD,
    "TP_SOCKET_IFNAME": _PD,
    "VLLM_HOST_IP": "https://docs.vllm.ai/en/latest/configuration/env_vars.html",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": (
        "https://docs.vllm.ai/en/latest/features/mooncake_connector_usage.html"
    ),
}


# One decode group over two hosts, behind the first one's port: what no shipped topology has.
OVER_TWO_HOSTS = """
name = "wide"
model = ["a", "b"]
connector = "nixl"
[engines]
weights = "w"
device = "cuda"
devices_per_host = 8
proxy_host = "10.0.0.1"
[engines.kv_transfer]
kv_load_failure_policy = "fail"
[engines.flags]
dtype = "auto"
disable_log_stats = true
[engines.prefill]
hosts = ["10.0.0.1"]
port = 8100
max_num_seqs = 8
side_channel_port = 5600
[engines.decode]
hosts = ["10.0.0.2", "10.0.0.3"]
instances = 1
port = 8100
tensor_parallel = 2
data_parallel = 8
dp_mode = "internal"
rpc_port = 13345
max_num_seqs = 8
side_channel_port = 5600
"""


def commands(*, npu: bool) -> list[Command]:
    """Return the engine commands of the shipped topologies on Ascend, or on anything else."""
    found: list[Command] = []
    for name in shipped_topologies():
        topology = read_topology(name)
        if topology.engines is not None and (topology.engines.device == "npu") == npu:
            found += engine_commands(topology.engines, topology.models)
    assert found
    return found


def value(command: Command, flag: str) -> str | None:
    return next((item[1] for item in command.words if item[0] == flag), None)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with vLLM")
def test_vllm_parses_every_command(tmp_path: Path) -> None:
    path = tmp_path / "wide.toml"
    path.write_text(OVER_TWO_HOSTS)
    wide = read_topology(path)
    assert wide.engines is not None
    given = [*commands(npu=False), *engine_commands(wide.engines, wide.models)]
    # vLLM takes the model as the first word after `serve`.
    words = [[word for item in command.words for word in item][2:] for command in given]
    result = subprocess.run(
        [os.environ[PYTHON], "-c", PARSE],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    parsed = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(given)
    for command, (port, ranks, rank, seqs, connector, role, policy) in zip(
        given, parsed, strict=True
    ):
        assert str(port) == (value(command, "--port") or "8000")
        assert str(ranks) == (value(command, "--data-parallel-size") or "1")
        assert (None if rank is None else str(rank)) == value(command, "--data-parallel-rank")
        assert str(seqs) == value(command, "--max-num-seqs")
        config = json.loads(value(command, "--kv-transfer-config") or "")
        assert (connector, role) == (config["kv_connector"], config["kv_role"])
        assert policy == "fail"


def test_every_ascend_flag_is_documented() -> None:
    for command in commands(npu=True):
        assert command.words[0][:2] == ("vllm", "serve")
        assert {item[0] for item in command.words[1:]} <= ASCEND_FLAGS.keys()
        assert command.environment.keys() <= ASCEND_ENVIRONMENT.keys()
        additional = json.loads(value(command, "--additional-config") or "{}")
        assert additional.keys() <= ASCEND_ADDITIONAL.keys()


def test_every_ascend_transfer_says_what_the_connector_asserts() -> None:
    # vllm-ascend, kv_p2p/mooncake_connector.py, _get_prefill_decode_size.
    for command in commands(npu=True):
        config = json.loads(value(command, "--kv-transfer-config") or "")
        assert config["kv_connector"] == "MooncakeConnectorV1"
        assert config["kv_role"] == ("kv_producer", "kv_consumer")[command.role == "decode"]
        extra = config["kv_connector_extra_config"]
        assert extra.keys() == {"prefill", "decode"}
        own = extra[command.role]
        assert str(own["tp_size"]) == value(command, "--tensor-parallel-size")
        assert str(own["dp_size"]) == (value(command, "--data-parallel-size") or "1")
        assert extra["prefill"]["tp_size"] % extra["decode"]["tp_size"] == 0
