"""The engines know the flags: real vLLM's parser for GPUs and CPUs, lists of options for all."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.script import ROOT
from tests.topologies.engine_files import read, text

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.topology import parse_with
from balanceroute.topologies.checks import check_options, known_options
from balanceroute.topologies.commands import Command, engine_commands
from balanceroute.topologies.engines import Engines
from balanceroute.topologies.topology import read_topology, shipped_topologies

OPTIONS = ROOT / "topologies" / "options"

# An interpreter with vLLM; its parser needs no accelerator.
PYTHON = "BALANCEROUTE_VLLM_PYTHON"
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


# A prefiller of two stages on two hosts, with a store beside its connector.
STAGES = """
name = "stages"
connector = "mooncake"
[engines]
weights = "w"
device = "cuda"
devices_per_host = 8
proxy_host = "10.0.0.1"
[engines.kv_transfer]
kv_load_failure_policy = "fail"
[engines.kv_store]
kv_connector = "MooncakeStoreConnector"
[engines.environment]
PYTHONHASHSEED = 0
[engines.prefill]
hosts = ["10.0.0.1", "10.0.0.2"]
instances = 1
port = 8100
tensor_parallel = 8
pipeline_parallel = 2
master_port = 29501
max_num_seqs = 8
bootstrap_port = 8998
[engines.decode]
hosts = ["10.0.0.3"]
port = 8100
tensor_parallel = 8
max_num_seqs = 8
"""


def engines_of(*, npu: bool) -> list[Engines]:
    """Return the engines of the shipped topologies on Ascend, or on anything else."""
    read = [read_topology(name).engines for name in shipped_topologies()]
    found = [e for e in read if e is not None and (e.device == "npu") == npu]
    assert found
    return found


def commands(*, npu: bool) -> list[Command]:
    """Return their commands."""
    return [
        command for engines in engines_of(npu=npu) for command in engine_commands(engines, ("m",))
    ]


def value(command: Command, flag: str) -> str | None:
    return next((item[1] for item in command.words if item[0] == flag), None)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with vLLM")
def test_vllm_parses_every_command(tmp_path: Path) -> None:
    given = commands(npu=False)
    for content in (OVER_TWO_HOSTS, STAGES):
        topology = read(tmp_path, content)
        assert topology.engines is not None
        given += engine_commands(topology.engines, topology.models)
    version, parsed = parse_with(os.environ[PYTHON], given)
    assert {engines.version for engines in engines_of(npu=False)} == {version.partition("+")[0]}
    for command, one in zip(given, parsed, strict=True):
        assert not one.fault, command.one_line()
        values = one.values
        assert str(values["port"]) == (value(command, "--port") or "8000")
        assert str(values["data_parallel_size"]) == (value(command, "--data-parallel-size") or "1")
        rank = values["data_parallel_rank"]
        assert (None if rank is None else str(rank)) == value(command, "--data-parallel-rank")
        assert str(values["max_num_seqs"]) == value(command, "--max-num-seqs")
        for name in ("pipeline_parallel_size", "nnodes", "node_rank"):
            least = "0" if name == "node_rank" else "1"
            assert str(values[name]) == (value(command, f"--{name.replace('_', '-')}") or least)
        config = json.loads(value(command, "--kv-transfer-config") or "")
        assert values["kv_connector"] == config["kv_connector"]
        assert (values["kv_role"], values["kv_policy"]) == (config["kv_role"], "fail")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with vLLM")
def test_the_list_of_a_version_is_what_its_parser_knows() -> None:
    listed = subprocess.run(
        [sys.executable, str(ROOT / "scripts/list_engine_options.py"), os.environ[PYTHON]],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    version = tomllib.loads((OPTIONS / "vllm-0.32.0.toml").read_text())
    assert tomllib.loads(listed.stdout) == version


def test_every_layout_names_a_version_whose_options_are_listed() -> None:
    """The parser itself judges in `make test-vllm`; here the lists do, and for Ascend only they."""
    layouts = [*engines_of(npu=False), *engines_of(npu=True)]
    for engines in layouts:
        options, theirs = known_options(engines)
        assert theirs, engines.version
        assert options.engine == f"vllm{'-ascend' * (engines.device == 'npu')} {engines.version}"
        assert not list(check_options(engines))
        for command in engine_commands(engines, ()):
            flags = {item[0].partition("=")[0] for item in command.words[1:]}
            known = {f"--{flag.replace('_', '-')}" for flag in options.flags}
            assert flags <= known | {f"--no-{flag[2:]}" for flag in known}
            given = {name for name in command.environment if name.startswith("VLLM_")}
            assert given <= options.variables


UNKNOWN = (
    (
        "flags = { kv_cache_dtpye = 'fp8' }",
        "flags.kv_cache_dtpye",
        "did you mean 'kv_cache_dtype'?",
    ),
    ("compilation = { cudagraph_mod = 'NONE' }", "compilation.cudagraph_mod", "cudagraph_mode"),
    ("kv_transfer = { kv_buffer_divice = 'cpu' }", "kv_transfer.kv_buffer_divice", "kv_buffer_dev"),
)


@pytest.mark.parametrize(("decode", "key", "reason"), UNKNOWN)
@pytest.mark.parametrize(("version", "level"), [("0.32.0", "error"), ("0.9.9", "note")])
def test_an_option_that_the_version_does_not_know_is_found(
    decode: str, key: str, reason: str, version: str, level: str, tmp_path: Path
) -> None:
    engines = read(tmp_path, text(engines=f'version = "{version}"', decode=decode)).engines
    assert engines is not None
    (found,) = check_options(engines)
    assert str(found).startswith(f"{level}: engines.decode.{key}: vllm 0.32.0 knows no such ")
    assert reason in found.reason


def test_what_an_engine_passes_over_is_a_note(tmp_path: Path) -> None:
    decode = (
        "environment = { VLLM_RPC_TIMEOUT = 1, HCCL_ANYTHING = 1 }\n"
        "additional = { enable_mlapoo = true, mlapo_keep_prefill_weights = true }"
    )
    content = text("mooncake-ascend", engines='version = "0.23.0"', decode=decode)
    engines = read(tmp_path, content).engines
    assert engines is not None
    assert [
        str(found).partition(": vllm-ascend 0.23.0 knows")[0] for found in check_options(engines)
    ] == [
        "note: engines.decode.environment.VLLM_RPC_TIMEOUT",
        "note: engines.decode.additional.enable_mlapoo",
    ]


def answering(folder: Path, found: list[list[object]]) -> str:
    """Return a program that answers as the parser of another interpreter does."""
    program = folder / "python"
    answer = json.dumps({"version": "0.32.0", "found": found})
    program.write_text(f"#!/bin/sh\ncat >/dev/null\necho starting\necho '{answer}'\n")
    program.chmod(0o755)
    return str(program)


def test_the_parser_of_an_installed_engine_goes_before_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = text(engines='version = "0.32.0"', decode="flags = { not_listed = 1 }")
    path = str(read(tmp_path, content).path)
    python = answering(tmp_path, [["", {}], ["", {}]])
    assert main(["topology", "check", path, "--engine-python", python]) == 0
    assert "flags by the parser of vLLM 0.32.0" in capsys.readouterr().out
    fault = "unrecognized arguments: --not-listed"
    python = answering(tmp_path, [["", {}], [fault, {}]])
    assert main(["topology", "check", path, "--engine-python", python]) == 2
    assert f"error: decode-0: {fault}" in capsys.readouterr().out
    assert main(["topology", "check", path, "--engine-python", str(tmp_path / "absent")]) == 2
    assert "--engine-python: " in capsys.readouterr().err


def test_every_ascend_transfer_says_what_the_connector_asserts() -> None:
    # vllm-ascend, kv_p2p/mooncake_connector.py, _get_prefill_decode_size.
    for command in commands(npu=True):
        config = json.loads(value(command, "--kv-transfer-config") or "")
        if config["kv_connector"] == "MultiConnector":
            config, store = config["kv_connector_extra_config"]["connectors"]
            assert store["kv_role"] == config["kv_role"]
        assert config["kv_connector"] in ("MooncakeConnectorV1", "MooncakeHybridConnector")
        assert config["kv_role"] == ("kv_producer", "kv_consumer")[command.role == "decode"]
        extra = config["kv_connector_extra_config"]
        assert extra.keys() == {"prefill", "decode"}
        own = extra[command.role]
        assert str(own["tp_size"]) == value(command, "--tensor-parallel-size")
        assert str(own["dp_size"]) == (value(command, "--data-parallel-size") or "1")
        assert str(own.get("pp_size", 1)) == (value(command, "--pipeline-parallel-size") or "1")
        assert "pp_size" not in extra["decode"]
        assert extra["prefill"]["tp_size"] % extra["decode"]["tp_size"] == 0
