"""`balanceroute topology commands` and scripts/launch_topology.sh, before programs that do nothing."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.topologies.engine_files import read, text

from balanceroute.proxy.__main__ import main

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_topology.sh"
BALANCEROUTE = Path(sys.executable).with_name("balanceroute")


def printed_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["topology", "commands", *arguments]) == 0
    return capsys.readouterr().out


def test_all_processes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed_by(["vllm-cpu-1p2d"], capsys)
    heads = [line for line in shown.splitlines() if line.startswith("# ")]
    assert heads == [
        "# prefill-0 on 127.0.0.1: http://127.0.0.1:8100",
        "# decode-0 on 127.0.0.1: http://127.0.0.1:8200",
        "# decode-1 on 127.0.0.1: http://127.0.0.1:8201",
        "# proxy on 127.0.0.1: the proxy",
    ]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--host", "10.0.0.1"], ["prefill-0", "proxy"]),
        (["--host", "10.0.0.6"], ["decode-4", "decode-5", "decode-6", "decode-7"]),
        (["--role", "prefill"], ["prefill-0", "prefill-1", "prefill-2", "prefill-3"]),
        (["--host", "10.0.0.1", "--role", "proxy"], ["proxy"]),
        (["--host", "10.0.0.1", "--role", "decode"], []),
    ],
)
def test_a_host_or_a_role_can_be_chosen(
    arguments: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed_by(["ascend-4p1d", *arguments, "--lines"], capsys).splitlines()
    assert [line.partition("\t")[0] for line in lines] == names


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ascend-4p1d", "--host", "10.0.0.42"], "did you mean '10.0.0.4'?"),
        (["emulated-2p8d"], "`balanceroute up emulated-2p8d` starts them"),
        (["ascend-4p"], "did you mean 'ascend-4p1d'?"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", "commands", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_addresses_alone_have_no_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rack.toml"
    path.write_text('name = "x"\n[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d"\n')
    assert main(["topology", "commands", str(path)]) == 2
    assert "has no [engines] table" in capsys.readouterr().err
    assert main(["topology", "check", str(path)]) == 0


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment in which `vllm` writes what it is given, and ends if its model says so."""
    folder = tmp_path / "bin"
    folder.mkdir()
    vllm = folder / "vllm"
    vllm.write_text(
        '#!/bin/bash\nprintf "%s\\n" "$VLLM_HOST_IP" "$@"\n'
        '[[ "$*" == *"--port 8200"* && $2 == dies ]] && exit 7\nexec sleep 60\n'
    )
    vllm.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "BALANCEROUTE": str(BALANCEROUTE),
    }


def launch(arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(SCRIPT), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_script_prints_what_it_would_run(
    programs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    process = launch(["--print", "ascend-4p1d", "10.0.0.6"], programs)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert printed == printed_by(["ascend-4p1d", "--host", "10.0.0.6"], capsys)


@pytest.mark.parametrize("arguments", [[], ["--print"], ["a"], ["--colour", "a", "b"], ["--logs"]])
def test_the_script_shows_how_it_is_used(arguments: list[str], programs: dict[str, str]) -> None:
    process = launch(arguments, programs)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "launch_topology.sh [--print]" in said


def one_host(folder: Path, weights: str) -> Path:
    engines = f'weights = "{weights}"\nproxy_host = "10.0.0.9"'
    decode = 'hosts = ["10.0.0.1"]\nside_channel_port = 5700\nflags = { tokenizer = "a b\'c" }'
    read(folder, text(engines=engines, decode=decode))
    return folder / "fleet.toml"


def test_the_first_process_to_end_ends_the_rest(tmp_path: Path, programs: dict[str, str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    # A supervisor's restart erased why the last one had ended.
    (logs / "decode-0.log").write_text("killed for memory\n")
    path = one_host(tmp_path, "dies")
    process = launch(["--logs", str(logs), str(path), "10.0.0.1"], programs)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "a process ended with status 7" in said
    assert sorted(log.name for log in logs.iterdir()) == ["decode-0.log", "prefill-0.log"]
    assert (logs / "decode-0.log").read_text().startswith("killed for memory\n10.0.0.1\n")


def test_a_signal_ends_all_processes(tmp_path: Path, programs: dict[str, str]) -> None:
    logs = tmp_path / "logs"
    path = one_host(tmp_path, "lives")
    process = launch(["--logs", str(logs), str(path), "10.0.0.1"], programs)
    deadline = time.monotonic() + 30
    while not all(
        (logs / f"{name}.log").is_file()
        and "--kv-transfer-config" in (logs / f"{name}.log").read_text()
        for name in ("prefill-0", "decode-0")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    # The pipes close when the last of them has ended.
    process.communicate(timeout=30)
    assert process.returncode == 143
    got = (logs / "decode-0.log").read_text().splitlines()
    assert got[:3] == ["10.0.0.1", "serve", "lives"]
    assert got[got.index("--tokenizer") + 1] == "a b'c"
    assert shlex.join(got)
