"""`balanceroute emulate`: its settings reach the fleet, and a signal ends it."""

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.command_line import refused

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate import DpMode, EmulationSettings, Frontend, Preemption


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "-1"], "--ranks is -1, must be from 0"),
        (["--ranks", "0", "--prefillers", "0"], "--ranks is 0, and --prefillers is 0 too"),
        (["--batch", "0"], "--batch is 0, must be from 1"),
        (["--step-base-ms", "0"], "--step-base-ms is 0.0, must be from 0.001"),
        (["--step-us-per-token", "nan"], "--step-us-per-token is nan"),
        (["--prefill-base-ms", "inf"], "--prefill-base-ms is inf"),
        (["--lease-s", "0"], "--lease-s is 0.0"),
        (["--time-scale", "0"], "--time-scale is 0.0"),
        (["--kv-capacity", "0"], "--kv-capacity is 0"),
        (["--port", "65530"], "--port is 65530, too high for 10 engines"),
        (["--host", "a..b"], "--host is 'a..b': it has a host that is neither"),
        (["--port", "70000"], "--port is 70000, must be from 0 to 65535"),
        (["--connector", "carrier-pigeon"], "invalid choice: 'carrier-pigeon'"),
    ],
    ids=" ".join,
)
def test_a_bad_setting_is_named_with_its_reason(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["emulate", *arguments], capsys)


def test_the_flags_reach_the_fleet_in_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def stop(settings: EmulationSettings, **_: object) -> None:
        given.append(settings)
        raise ConfigError("seen enough")

    monkeypatch.setattr("balanceroute.proxy.cli.emulate.EmulatedFleet", stop)
    command = (
        "emulate --prefillers 3 --ranks 5 --batch 7 --step-base-ms 12.5 --step-us-per-token 0.5 "
        "--prefill-base-ms 1.5 --prefill-us-per-token 4 --transfer-base-ms 2.5 "
        "--transfer-us-per-token 0.25 --kv-capacity 9000 --prefill-kv-capacity 8000 --lease-s 9 "
        "--connector mooncake-ascend --dp-mode header --preemption stop --time-scale 2 --model m "
        "--max-model-len 4096 --mean-output 33 --prompt-tokens-details --reasoning-parser "
        "--partial-utf8 0.1 --merged-outputs 0.2 --frontend rust --port 0"
    )
    assert main(command.split()) == 2
    assert given == [
        EmulationSettings(
            prefillers=3,
            ranks=5,
            batch_limit=7,
            step_base_ns=12_500_000,
            step_ns_per_token=500.0,
            prefill_base_ns=1_500_000,
            prefill_ns_per_token=4_000.0,
            transfer_base_ns=2_500_000,
            transfer_ns_per_token=250.0,
            rank_kv_tokens=9_000,
            prefiller_kv_tokens=8_000,
            lease_s=9.0,
            connector="mooncake-ascend",
            dp_mode=DpMode.HEADER,
            preemption=Preemption.STOP,
            frontend=Frontend.RUST,
            time_scale=2.0,
            model="m",
            max_model_len=4_096,
            mean_output_tokens=33.0,
            prompt_tokens_details=True,
            reasoning_parser=True,
            partial_utf8=0.1,
            merged_outputs=0.2,
        )
    ]


def test_without_flags_the_fleet_has_its_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def stop(settings: EmulationSettings, **_: object) -> None:
        given.append(settings)
        raise ConfigError("seen enough")

    monkeypatch.setattr("balanceroute.proxy.cli.emulate.EmulatedFleet", stop)
    assert main(["emulate", "--port", "0"]) == 2
    assert given == [EmulationSettings()]


def test_the_help_tells_no_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["emulate", "--help"])
    text = capsys.readouterr().out
    assert "--step-base-ms" in text
    assert "None" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_announces_its_engines_and_ends_on_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--port", "0"]
    command += ["--ranks", "2", "--prefillers", "1"]
    json_ready = number is signal.SIGTERM
    if json_ready:
        command += ["--json-ready", "--connector", "mooncake"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        lines = [one.stdout.readline() for _ in range(1 if json_ready else 4)]
        one.send_signal(number)
        rest, errors = one.communicate(timeout=20)
    assert (one.returncode, rest, errors) == (0, "", "")
    if json_ready:
        ready = json.loads(lines[0])
        assert ready["ready"] is True
        assert [len(ready[role]) for role in ("prefill", "decode", "bootstrap")] == [1, 2, 1]
    else:
        names = [line.split(" ")[0] for line in lines]
        assert names == ["prefill/0", "decode/0", "decode/1", "ready\n"]
        assert all("http://127.0.0.1:" in line for line in lines[:3])


def test_the_command_ends_with_its_standard_input() -> None:
    command = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--port", "0", "--json-ready"]
    command.append("--exit-with-stdin")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        assert one.stdin is not None
        assert json.loads(one.stdout.readline())["ready"] is True
        one.stdin.write("still here\n")
        one.stdin.flush()
        assert one.poll() is None
        rest, errors = one.communicate(timeout=20)  # Closes its standard input.
    assert (one.returncode, rest, errors) == (0, "", "")


def test_a_standard_input_that_cannot_be_waited_for_is_refused() -> None:
    command = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--port", "0"]
    result = subprocess.run(
        [*command, "--exit-with-stdin"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=20,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("balanceroute: --exit-with-stdin: standard input: ")
