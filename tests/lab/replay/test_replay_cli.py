"""`balanceroute replay`: its flags, its exit statuses and what it leaves behind."""

import asyncio
import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import refused

from balanceroute import __version__
from balanceroute.proxy.__main__ import main
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay import driver
from balanceroute.proxy.lab.replay.driver import FleetFigures
from balanceroute.proxy.lab.replay.requests import (
    PlannedRequest,
    ReplayApi,
    ReplayLengths,
    ReplaySettings,
)
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest
from balanceroute.traces import TraceRequest, write_native

TRACE = "trace.jsonl"
NOWHERE = ["replay", "--target", "http://127.0.0.1:9", "--trace", TRACE]
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Three milliseconds apart; one of them failed when it was recorded.
    write_native(
        TRACE, [TraceRequest(i * 3_000_000, 20 + i, 0 if i == 7 else 3) for i in range(30)]
    )
    Path("key").write_text(f"{KEY}\n")


Answer = Callable[[HttpRequest, Reply], None]


def whole(request: HttpRequest, reply: Reply) -> None:
    """Answer like an engine that needs no time."""
    if request.path == b"/v1/models":
        reply.send(200, [], b'{"data": [{"id": "tiny"}]}')
        return
    if request.path.startswith(b"/emulation/"):
        figures = dict.fromkeys((field.name for field in dataclasses.fields(FleetFigures)), 0.0)
        figures |= {"idle_fraction": 0.25, "mean_imbalance_tokens": 99.0, "steps": 7}
        reply.send(200, [], json.dumps(figures).encode())
        return
    asked = json.loads(request.body)
    reply.start(200, [(b"content-type", b"text/event-stream")])
    for token in range(asked["max_tokens"]):
        reason = "length" if token + 1 == asked["max_tokens"] else None
        choice = {"text": "x", "delta": {"content": "x"}, "finish_reason": reason}
        reply.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    usage = {"prompt_tokens": 50, "completion_tokens": asked["max_tokens"]}
    reply.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
    reply.write(b"data: [DONE]\n\n")
    reply.end()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Return what puts a server into the command's own loop, in place of the target it names."""

    def install(answer: Answer) -> None:
        async def with_server(
            settings: ReplaySettings, *arguments: Any, **options: Any
        ) -> driver.ReplayResult:
            server = Server(answer)
            await server.start("127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.port}"
            emulation = None if settings.emulation is None else url
            there = dataclasses.replace(settings, target=url, emulation=emulation)
            try:
                return await driver.replay(there, *arguments, **options)
            finally:
                server.close()
                await server.drain()

        monkeypatch.setattr("balanceroute.proxy.cli.replay.replay", with_server)

    return install


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate", "0"], "--rate is 0.0, must be from 1e-06 to 1e+06"),
        (["--rate", "nan"], "--rate is nan, must be from"),
        (["--rate", "fast"], "--rate is 'fast', must be a number"),
        (["--concurrency", "0"], "--concurrency is 0, must be from 1"),
        (["--concurrency", "1000000"], "--concurrency is 1000000, must be"),
        (["--rate", "1", "--concurrency", "8"], "not allowed with argument --rate"),
        (["--requests", "0"], "--requests is 0, must be from 1"),
        (["--skip", "-1"], "--skip is -1, must be from 0"),
        (["--skip", "30"], "no request to send: the trace has 30, 30 skipped"),
        (["--timeout", "0"], "--timeout is 0.0, must be from 0.001"),
        (["--timeout", "inf"], "--timeout is inf, must be"),
        (["--time-scale", "0"], "--time-scale is 0.0, must be from 0.001"),
        (["--time-scale", "nan"], "--time-scale is nan, must be"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens is 0, must be from 1"),
        (["--max-output-tokens", "0"], "--max-output-tokens is 0, must be from 1"),
        (["--seed", "many"], "--seed is 'many', must be an integer"),
        (["--api", "embeddings"], "argument --api: invalid choice: 'embeddings'"),
        (["--format", "parquet"], "argument --format: invalid choice: 'parquet'"),
        (["--target", "127.0.0.1:8000"], "--target: '127.0.0.1:8000' is not of the form"),
        (["--lengths", "hidden"], "--lengths hidden: needs --emulation"),
        (["--emulation", "fleet"], "--emulation: 'fleet' is not of the form"),
        (["--trace", "absent"], "absent: no such file, and no shipped trace"),
        (["--sharegpt", "absent"], "absent: No such file or directory"),
        (["--sharegpt", TRACE], f"{TRACE}: not valid JSON"),
        (["--api-key-file", "absent"], "absent: No such file or directory"),
        (["--api-key-file", "empty"], "--api-key-file: empty does not hold one line"),
        (["--api-key-file", "two"], "--api-key-file: two does not hold one line"),
        (["--json", "absent/out.json"], "--json: absent is not a directory"),
        (["--json", "."], "--json: . is a directory"),
        (["--requests-json", "absent/out"], "--requests-json: absent is not a directory"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_setting_is_named_with_its_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").write_text("\n")
    Path("two").write_text("a\nb\n")
    assert reason in refused([*NOWHERE, *arguments], capsys)


@pytest.mark.parametrize("flag", ["--target", "--trace"])
def test_the_target_and_the_trace_must_be_given(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = NOWHERE.index(flag)
    assert "required" in refused(NOWHERE[:at] + NOWHERE[at + 2 :], capsys)


def test_a_secret_is_never_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad").write_text(f"{KEY}\n{KEY}")
    assert KEY not in refused([*NOWHERE, "--api-key-file", "bad"], capsys)


def test_nobody_at_the_target_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no connection to http://127.0.0.1:9" in refused(NOWHERE, capsys)


def test_a_replay_prints_its_figures_and_writes_them(
    serve: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(whole)
    arguments = ["--label", "br-0", "--json", "out.json", "--requests-json", "requests.json"]
    assert main([*NOWHERE, *arguments, "--rate", "2", "--api-key-file", "key"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    assert "trace.jsonl: 29 requests, rate 2, to tiny at http://127.0.0.1:9" in captured.out
    assert "1 requests without output are left out" in captured.out
    text = Path("out.json").read_text()
    assert KEY not in text
    report = json.loads(text)
    config = report["config"]
    assert config["model"] == "tiny"
    assert (config["rate"], config["concurrency"], config["requests"]) == (2.0, None, 29)
    assert config["version"] == __version__
    assert config["interrupted"] is False
    (row,) = report["results"]
    assert (row["policy"], row["finished"], row["errors"]) == ("br-0", 29, 0)
    assert row["output_tokens"] == 87
    assert row["prompt_tokens"] == 29 * 50
    numbers = [line["number"] for line in json.loads(Path("requests.json").read_text())]
    assert numbers == [i for i in range(30) if i != 7]


def test_tenants_and_classes_of_a_trace_have_keys_headers_and_figures(
    serve: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: set[tuple[bytes | None, bytes | None, bytes | None]] = set()

    def answer(request: HttpRequest, reply: Reply) -> None:
        if request.path == b"/v1/completions":
            names = (b"authorization", b"priority", b"x-request-deadline-ms")
            one, two, three = (request.header(name) for name in names)
            seen.add((one, two, three))
        whole(request, reply)

    write_native(
        TRACE,
        [
            TraceRequest(
                i * 1_000_000,
                20,
                3,
                tenant=("acme", "batch")[i % 2],
                level=-(i % 2),
                deadline_ns=None if i % 2 else 2_000_000_000,
            )
            for i in range(30)
        ],
    )
    Path("keys.toml").write_text(f'acme = "{KEY}"\nbatch = "sk-other"\n')
    serve(answer)
    flags = ["--tenant-keys", "keys.toml", "--ttft-target", "30", "--json", "out.json"]
    assert main([*NOWHERE, *flags]) == 0
    assert seen == {(f"Bearer {KEY}".encode(), None, b"2000"), (b"Bearer sk-other", b"u=2", None)}
    out = capsys.readouterr().out
    assert "Tenants and classes; good: TTFT up to 30 s" in out
    text = Path("out.json").read_text()
    assert KEY not in text
    groups = json.loads(text)["results"][0]["groups"]
    assert [(row["tenant"], row["class"], row["goodput"]) for row in groups] == [
        ("acme", 0, 1.0),
        ("batch", -1, 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no tenant"),
        (f"acme = {KEY}", "is not valid TOML"),
        ("acme = 7", "the key of acme is no text of printable ASCII"),
        ('acme = "a\\nb"', "the key of acme is no text of printable ASCII"),
    ],
)
def test_keys_of_tenants_that_are_none_are_refused_without_being_shown(
    text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("keys.toml").write_text(text)
    line = refused([*NOWHERE, "--tenant-keys", "keys.toml"], capsys)
    assert "--tenant-keys: keys.toml" in line
    assert reason in line
    assert KEY not in line


def test_a_failed_request_is_told_and_exits_with_1(
    serve: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: HttpRequest, reply: Reply) -> None:
        if (request.header(b"x-request-id") or b"").endswith(b"-3"):
            reply.send(503, [], b'{"error": {"message": "no room"}}')
        else:
            whole(request, reply)

    serve(answer)
    assert main([*NOWHERE, "--json", "out.json"]) == 1
    out = capsys.readouterr().out
    assert "http 503" in out
    assert "no room" in out
    (row,) = json.loads(Path("out.json").read_text())["results"]
    assert row["faults"] == [{"kind": "http 503", "requests": 1, "example": "no room"}]


def test_an_interrupt_prints_what_was_measured_and_exits_with_130(
    serve: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: HttpRequest, reply: Reply) -> None:
        if (request.header(b"x-request-id") or b"").endswith(b"-20"):
            signal.raise_signal(signal.SIGINT)
        else:
            whole(request, reply)

    serve(answer)
    assert main([*NOWHERE, "--json", "out.json", "--concurrency", "1"]) == 130
    assert "Interrupted after 20 requests were sent; 1 were given up." in capsys.readouterr().out
    report = json.loads(Path("out.json").read_text())
    assert report["config"]["interrupted"] is True
    (row,) = report["results"]
    assert (row["finished"], row["cancelled"], row["errors"]) == (19, 1, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_the_command(
    serve: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: HttpRequest, reply: Reply) -> None:
        # The second one while the fleet's figures are waited for.
        waited = request.path == b"/emulation/stats"
        if waited or (request.header(b"x-request-id") or b"").endswith(b"-20"):
            signal.raise_signal(signal.SIGINT)
        else:
            whole(request, reply)

    serve(answer)
    arguments = ["--concurrency", "1", "--emulation", "http://127.0.0.1:9"]
    assert main([*NOWHERE, *arguments]) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("soft", "hard", "calls"), [(256, 4096, [(4096, 4096)]), (4096, 4096, []), (256, -1, [])]
)
def test_as_many_connections_are_allowed_as_the_system_does(
    soft: int,
    hard: int,
    calls: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[[Answer], None],
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: made.append(limits))
    serve(whole)
    assert main(NOWHERE) == 0
    assert made == calls


def test_the_fleets_figures_are_in_the_report(
    serve: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(whole)
    arguments = ["--emulation", "http://127.0.0.1:9", "--time-scale", "10", "--json", "out.json"]
    assert main([*NOWHERE, *arguments]) == 0
    out = capsys.readouterr().out
    assert "The target runs 10 times faster than real time" in out
    assert "Lengths were told to the emulated engines alone" in out
    assert json.loads(Path("out.json").read_text())["config"]["lengths"] == "hidden"
    (row,) = json.loads(Path("out.json").read_text())["results"]
    assert (row["idle_fraction"], row["mean_imbalance_tokens"], row["steps"]) == (0.25, 99.0, 7)


def test_sharegpt_prompts_take_the_place_of_words(
    serve: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[str] = []

    def answer(request: HttpRequest, reply: Reply) -> None:
        if request.body:
            prompts.append(json.loads(request.body)["messages"][0]["content"])
        whole(request, reply)

    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
    Path("sharegpt.json").write_text(json.dumps([{"conversations": turns}]))
    serve(answer)
    arguments = ["--sharegpt", "sharegpt.json", "--api", "chat", "--requests", "3"]
    assert main([*NOWHERE, *arguments]) == 0
    assert prompts == 3 * ["Why?"]
    assert "lengths asked are estimates, a token for every 4 bytes" in capsys.readouterr().out


def test_the_flags_reach_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    async def stop(settings: ReplaySettings, requests: list[PlannedRequest], **_: object) -> None:
        given.extend([settings, requests])
        await asyncio.sleep(0)
        raise ConfigError("seen enough")

    monkeypatch.setattr("balanceroute.proxy.cli.replay.replay", stop)
    command = (
        f"replay --target https://h:8443 --trace {TRACE} --concurrency 3 --requests 4 --skip 2 "
        "--model m --api chat --timeout 7 --api-key-file key --seed 9 --time-scale 20 "
        "--max-prompt-tokens 23 --max-output-tokens 2 --emulation http://h:9 "
        "--stop-at-last-arrival"
    )
    assert main(command.split()) == 2
    settings, requests = given
    assert settings == ReplaySettings(
        target="https://h:8443",
        model="m",
        api=ReplayApi.CHAT,
        concurrency=3,
        time_scale=20.0,
        timeout_s=7.0,
        api_key=KEY,
        seed=9,
        request_ids=settings.request_ids,
        emulation="http://h:9",
        lengths=ReplayLengths.HIDDEN,
        drain=False,
    )
    assert [(r.number, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (2, 22, 2),
        (3, 23, 2),
        (4, 23, 2),
        (5, 23, 2),
    ]


def test_two_replays_have_different_request_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def stop(settings: ReplaySettings, *_: object, **__: object) -> None:
        seen.append(settings.request_ids)
        await asyncio.sleep(0)
        raise ConfigError("seen enough")

    monkeypatch.setattr("balanceroute.proxy.cli.replay.replay", stop)
    main(NOWHERE)
    main(NOWHERE)
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("words", "gap_ms", "warned"),
    [
        ([], 1, "by the trace are sent within 0.029 s (the unit of its times may be another"),
        ([], 1_000, None),
        ([], 200_000, "sent within 5,800 s (the unit of its times may be another: see --columns)"),
        (["--rate", "100"], 1_000, "span 29 s by the trace are sent within 0.29 s (--rate 100)"),
        (["--rate", "0.01"], 1_000, "span 29 s by the trace are sent within 2,900 s (--rate 0.01)"),
        (["--rate", "50"], 1_000, None),
        (["--concurrency", "2"], 1, None),
    ],
)
def test_a_pace_that_is_hardly_meant_is_told(
    words: list[str], gap_ms: int, warned: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent: the target does not answer."""
    write_native(TRACE, [TraceRequest(i * gap_ms * 1_000_000, 20, 3) for i in range(30)])
    main([*NOWHERE, *words])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [warned in line for line in told if warned] == ([True] if warned else [])
    assert bool(told) == bool(warned)
