"""`serve` and `up`: flags that reach the configuration, one clear line for a fault, no orphans."""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from tests.command_line import refused

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli import emulate, up
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import settings_of
from balanceroute.proxy.lab.emulate import process as engine_process
from balanceroute.proxy.live import serve as live_serve
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.settings.declared import SECTIONS
from balanceroute.topologies.topology import read_topology

ENGINES = ["--prefill", "http://p", "--decode", "http://d"]
TOPOLOGY = (
    'name = "x"\n[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d"\n[proxy]\nport = 1\n'
)
EMULATED = 'name = "x"\n[emulation]\nranks = 2\n'
READY = '{"ready": true, "prefill": ["http://p"], "decode": ["http://d:1", "http://d:2"]}'
# Engines that say they are ready, note that they run, and end with their standard input.
FAKE = f"""
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
print('{READY}', flush=True)
sys.stdin.read()
"""


def use_serve(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., int]) -> None:
    monkeypatch.setattr(live_serve, "serve", serve)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ProxyConfig]:
    """Return the configurations that were served, instead of serving them."""
    configs: list[ProxyConfig] = []

    def serve(config: ProxyConfig, *_: object) -> int:
        configs.append(config)
        return 0

    use_serve(monkeypatch, serve)
    return configs


def write(folder: Path, text: str) -> str:
    path = folder / "fleet.toml"
    path.write_text(text)
    return str(path)


def test_flags_reach_the_configuration(served: list[ProxyConfig]) -> None:
    command = (
        "serve --prefill http://p1 http://p2 --prefill http://p3 --decode http://d1 http://d2@3 "
        "--decode http://d2@4 --connector mooncake-ascend --model a b --policy br-0 --batch 16 "
        "--rank-kv-tokens 9000 --probe-limit none --horizon 7 --gamma 0.5 --beta auto --theta 3 "
        "--patience inf --projection point --paper --lease-s 60 --pool-ttl-s inf --no-admin "
        "--port 0 --retry-attempts 1 --log none --body-limit-bytes 4096"
    )
    assert main(command.split()) == 0
    (config,) = served
    assert config == make_config(
        None,
        {
            "prefill": ["http://p1", "http://p2", "http://p3"],
            "decode": ["http://d1", "http://d2@3", "http://d2@4"],
            "connector": "mooncake-ascend",
            "model": ["a", "b"],
            "policy": "br-0",
            "batch": 16,
            "rank_kv_tokens": 9000,
            "horizon": 7,
            "gamma": 0.5,
            "theta": 3,
            "patience": float("inf"),
            "projection": "point",
            "paper": True,
            "lease_s": 60.0,
            "pool_ttl_s": float("inf"),
            "admin": False,
            "port": 0,
            "retry_attempts": 1,
            "log": "none",
            "body_limit_bytes": 4096,
        },
    )


def test_a_flag_goes_before_the_topology(served: list[ProxyConfig], tmp_path: Path) -> None:
    path = write(tmp_path, TOPOLOGY)
    assert main(["serve", "--topology", path]) == 0
    assert main(["serve", "--topology", path, "--port", "2", "--decode", "http://e"]) == 0
    first, second = served
    assert (first.listening.port, first.decoders[0].url.host) == (1, "d")
    assert (second.listening.port, second.decoders[0].url.host) == (2, "e")
    assert second.prefillers == first.prefillers


def test_the_engines_key_is_taken_from_the_environment(
    served: list[ProxyConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALANCEROUTE_ENGINE_KEY", "sk-engine")
    assert main(["serve", *ENGINES]) == 0
    assert served[0].credentials.engine_key is not None
    assert served[0].credentials.engine_key.matches(b"sk-engine")


def test_the_status_is_that_of_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    use_serve(monkeypatch, lambda *_: 7)
    assert main(["serve", *ENGINES]) == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "--prefill: at least one is needed"),
        (["serve", "--prefill", "http://p"], "--decode: at least one is needed"),
        (["serve", "--prefill"], "--prefill: expected at least one argument"),
        (["serve", *ENGINES, "--port", "x"], "--port is 'x', must be an integer"),
        (["serve", *ENGINES, "--port", "70000"], "--port is 70000, must be from 0 to 65535"),
        (["serve", *ENGINES, "--gamma", "nan"], "--gamma is nan, must be from 1e-09 to 1"),
        (["serve", *ENGINES, "--lease-s", "long"], "--lease-s is 'long', must be a number"),
        (["serve", *ENGINES, "--policy", "psychic"], "--policy is 'psychic', which is no policy"),
        (["serve", *ENGINES, "--decode", "http://u:hunter2@e"], "must not carry credentials"),
        (["serve", "--topology", "emulated-2p8"], "did you mean 'emulated-2p8d'?"),
        (["serve", "--topology", "emulated-2p8d"], "start them with `balanceroute up`"),
        (["serve", "--topology", "absent.toml"], "absent.toml: No such file or directory"),
        (["serve", *ENGINES, "--polcy", "br-0"], "unrecognized arguments: --polcy"),
        (["serve", *ENGINES, "--pol", "br-0"], "unrecognized arguments: --pol"),
        (["up"], "the following arguments are required: TOPOLOGY"),
        (["up", "x", "--prefill", "http://p"], "unrecognized arguments: --prefill"),
        (["up", "absent.toml"], "absent.toml: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fault_is_told_in_one_line(
    arguments: list[str],
    words: str,
    served: list[ProxyConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(arguments, capsys)
    assert words in line
    assert "hunter2" not in line
    assert served == []


def test_a_fault_of_the_topology_is_told_with_its_place(
    served: list[ProxyConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, TOPOLOGY + "batch = 0")
    assert f"{path}: [proxy].batch is 0, must" in refused(["serve", "--topology", path], capsys)
    path = write(tmp_path, TOPOLOGY.replace("prefill", "prefil"))
    assert f"{path}: prefil: unknown key; did" in refused(["serve", "--topology", path], capsys)
    assert served == []


def test_every_setting_has_a_flag_and_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "up"):
        with pytest.raises(SystemExit) as exit_:
            main([command, "--help-all"])
        assert exit_.value.code == 0
        text = capsys.readouterr().out
        for section in SECTIONS:
            for setting in settings_of(section):
                there = re.search(rf"^  {setting.flag}[ ,\n]", text, re.MULTILINE) is not None
                assert there == (command == "serve" or not setting.at_top), setting.flag
        assert "None" not in text


def test_the_commands_can_be_offered_without_the_extra() -> None:
    program = (
        "import sys\n"
        "for name in ('httptools', 'httpx', 'prometheus_client', 'uvloop'):\n"
        "    sys.modules[name] = None\n"
        "from balanceroute.proxy.cli import serve, simulate, up\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_shipped_fleet_is_emulated_as_it_says() -> None:
    command = up.emulate_command(read_topology("emulated-2p8d"))
    assert command == [
        *[sys.executable, "-m", "balanceroute.proxy", "emulate"],
        *["--port=0", "--prefillers=2", "--ranks=8", "--batch=16"],
        *["--step-base-ms=30.0", "--step-us-per-token=0.2", "--kv-capacity=3000000"],
        *["--prefill-base-ms=20.0", "--prefill-us-per-token=50.0"],
        *["--lease-s=30.0", "--dp-mode=ports"],
        *["--connector=nixl", "--model=emulated"],
        *["--json-ready", "--exit-with-stdin"],
    ]


def test_every_word_of_the_fleet_is_understood_where_it_is_emulated(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    emulate.add_parser(parser.add_subparsers())
    words: dict[str, object] = {
        "host": "::1",
        "rank_speeds": [2.0, 3.0],
        "rank_batches": [2, 3],
        "pause_above": 0.5,
    }
    for setting in chain.from_iterable(map(settings_of, emulate.FILED)):
        if setting.at_top:
            continue
        key, value = setting.name, words.get(setting.name, 2)
        if isinstance(setting.default, bool):
            value = True
        elif setting.choices:
            value = next(word for word in setting.choices if word != setting.default)
        elif setting.metavar == "P" and setting.name != "prefillers":  # A probability.
            value = 0.5
        filed = json.dumps(value)
        path = write(tmp_path, f'name = "x"\nmodel = "m"\n[emulation]\n{key} = {filed}\n')
        command = up.emulate_command(read_topology(path))
        arguments = parser.parse_args(command[command.index("emulate") :])
        given = ",".join(map(str, value)) if isinstance(value, list) else value
        assert getattr(arguments, key) == given
        assert arguments.model == "m"
        assert arguments.json_ready
        assert arguments.exit_with_stdin


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (TOPOLOGY, "", "has no [emulation] table: put `balanceroute serve`"),
        (f"{EMULATED}rank = 2", "[emulation].rank", "unknown key; did you mean 'ranks'?"),
        (f"{EMULATED}seed = true", "[emulation].seed", "is True, must be an integer"),
        (f"{EMULATED}seed = [1]", "[emulation].seed", "is [1], must be"),
        (f"{EMULATED}prefillers = -1", "[emulation].prefillers", "is -1, must be from 0 to 1000"),
        (f'{EMULATED}dp_mode = "x"', "[emulation].dp_mode", "must be one of ports, header"),
        (f'{EMULATED}connector = "nixl"', "[emulation].connector", "belongs at the top"),
        (f"{EMULATED}json_ready = true", "[emulation].json_ready", "unknown key"),
        (f'model = ["a", "b"]\n{EMULATED}', "model", "serve one model, not several"),
    ],
)
def test_a_fleet_that_cannot_be_emulated_is_refused(
    text: str, place: str, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refusal:
        up.emulate_command(read_topology(path))
    assert str(refusal.value).startswith(f"{path}: {place}")
    assert reason in str(refusal.value)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that makes `up` run a program for its engines; it notes its pid in a file."""

    def use(program: str) -> Path:
        pid = tmp_path / "pid"
        command = [sys.executable, "-I", "-S", "-c", program, str(pid)]
        monkeypatch.setattr(up, "emulate_command", lambda _: command)
        return pid

    return use


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_up_serves_before_the_engines_that_it_started(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = fake(FAKE)
    configs: list[ProxyConfig] = []

    def serve(config: ProxyConfig, *_: object) -> int:
        configs.append(config)
        assert not gone(int(note.read_text()))
        return 5

    use_serve(monkeypatch, serve)
    path = write(tmp_path, f"{EMULATED}[proxy]\nport = 3\nbatch = 4\n")
    assert main(["up", path, "--port", "0"]) == 5
    (config,) = configs
    assert [server.url.name for server in config.prefillers] == ["http://p:80"]
    assert [server.url.name for server in config.decoders] == ["http://d:1", "http://d:2"]
    assert (config.listening.port, config.scheduling.batch) == (0, 4)
    assert gone(int(note.read_text()))


def test_up_finds_the_bootstrap_servers_of_its_engines(
    fake: Callable[[str], Path], served: list[ProxyConfig], tmp_path: Path
) -> None:
    ready = READY.replace("}", ', "bootstrap": ["http://b:9"]}')
    fake(FAKE.replace(READY, ready))
    assert main(["up", write(tmp_path, f'connector = "mooncake"\n{EMULATED}')]) == 0
    assert [str(server.bootstrap) for server in served[0].prefillers] == ["http://b:9"]


def test_up_ends_with_the_reason_when_its_engines_do(
    fake: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It served on for ever in front of nothing."""
    note = fake(FAKE)
    woken, wake = socket.socketpair()
    wake.setblocking(False)

    def serve(*_: object) -> int:
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        told = signal.set_wakeup_fd(wake.fileno())
        try:
            os.kill(int(note.read_text()), signal.SIGKILL)
            assert woken.recv(1) == bytes([signal.SIGTERM])
        finally:
            signal.set_wakeup_fd(told)
            signal.signal(signal.SIGTERM, before)
        return 0

    use_serve(monkeypatch, serve)
    with woken, wake:
        assert main(["up", "emulated-2p8d"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["prefill: http://p", "decode: http://d:1 http://d:2"]
    assert lines[2:] == ["balanceroute: the emulated engines ended by signal 9"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no port"), ConfigError("no")])
def test_the_engines_end_with_the_proxy_however_it_ends(
    error: BaseException | type[BaseException],
    fake: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = fake(FAKE)

    def serve(*_: object) -> int:
        raise error

    use_serve(monkeypatch, serve)
    assert main(["up", "emulated-2p8d"]) == (130 if error is KeyboardInterrupt else 2)
    assert gone(int(note.read_text()))


def test_engines_that_will_not_end_are_ended(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, served: list[ProxyConfig]
) -> None:
    note = fake(f"{FAKE}\nimport signal\nsignal.pause()")
    monkeypatch.setattr(engine_process, "_END_S", 0.05)
    assert main(["up", "emulated-2p8d"]) == 0
    assert len(served) == 1
    assert gone(int(note.read_text()))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit(3)", "ended with status 3 before they were ready"),
        ("print('', end='')", "ended with status 0 before they were ready"),
        ("import os, sys\nos.close(1)\nsys.stdin.read()", "ended with status -9 before"),
        ("print('hello')", r"said b'hello\n' instead of ready"),
        ('print(\'{"ready": false, "prefill": ["http://p"], "decode": ["http://d"]}\')', "instead"),
        ('print(\'{"ready": true, "prefill": [], "decode": ["http://d"]}\')', "instead of ready"),
        ('print(\'{"ready": true, "prefill": ["http://p"], "decode": [1]}\')', "instead of ready"),
        ("print('{\"ready\": true}')", "instead of ready"),
        ("print('[]')", "instead of ready"),
        ("print((1 << 20) * 'x', end='x', flush=True)\nimport sys\nsys.stdin.read()", "said b'xx"),
        ("import sys\nsys.stdin.read()", "not ready after 0.2 s"),
    ],
)
def test_engines_that_do_not_start_are_reported_and_ended(
    program: str,
    words: str,
    fake: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    served: list[ProxyConfig],
    capfd: pytest.CaptureFixture[str],
) -> None:
    note = fake(f"import os, sys\nopen(sys.argv[1], 'w').write(str(os.getpid()))\n{program}")
    monkeypatch.setattr(engine_process, "_READY_S", 0.2 if "not ready" in words else 10.0)
    line = refused(["up", "emulated-2p8d"], capfd)
    assert line.startswith("balanceroute: the emulated engines ")
    assert words in line
    assert len(line) < 200
    assert served == []
    assert gone(int(note.read_text()))


def test_engines_do_not_outlive_a_proxy_that_is_killed() -> None:
    program = (
        "import os, sys, signal\n"
        "from balanceroute.proxy.lab.emulate import process\n"
        "command = [sys.executable, '-I', '-S', '-c', sys.argv[1], os.devnull]\n"
        "with process.emulated_engines(command) as engines:\n"
        "    print(engines, flush=True)\n"
        "    signal.pause()\n"
    )
    # Both processes hold this pipe, so it ends when the last of them does.
    with subprocess.Popen(
        [sys.executable, "-c", program, FAKE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"http://d:2" in process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        assert process.stderr.read() == b""
        assert process.wait() == -signal.SIGKILL


def test_kv_cache_events_need_their_extra() -> None:
    program = (
        "import sys; sys.modules['zmq'] = None; from balanceroute.proxy.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    words = "serve --prefill http://p --decode http://d --port 0 --admin-port 0 --log none"
    words += " --prefill-choice prefix-aware --kv-events tcp://p:5557"
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--kv-events: needs the extra kv-events: pip install '.[kv-events]'" in done.stderr
