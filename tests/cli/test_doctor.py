"""`balanceroute doctor`: emulated engines of each connector, and what else may answer at an address."""

import asyncio
import json
import random
import shlex
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.command_line import Answering, answered_by
from tests.support.certificate import CERT, KEY

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.command_line import make_parser
from balanceroute.proxy.cli.doctor import DoctorSettings, diagnose
from balanceroute.proxy.cli.serve import flags_given
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings
from balanceroute.proxy.live import serve as live_serve
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.serve import ServeCommand
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config

SMALL = EmulationSettings(prefillers=1, ranks=2, time_scale=50.0)
CONNECTORS = ("nixl", "mooncake", "mooncake-ascend", "mooncake-hybrid", "mooncake-layerwise")


@dataclass(frozen=True)
class Seen:
    """What the command said, and what its engines were left with."""

    status: int
    text: str
    left: bool  # Whether an engine holds anything still.
    urls: list[str]

    @property
    def serve(self) -> list[str]:
        """The words of the command at the end."""
        return shlex.split(self.text.splitlines()[-1])


def examine(
    settings: EmulationSettings,
    capsys: pytest.CaptureFixture[str],
    words: Callable[[EmulatedFleet], list[str]],
    spoil: Callable[[EmulatedFleet], object] = lambda _: None,
) -> Seen:
    """Run the command on emulated engines."""

    async def play() -> tuple[int, bool, list[str]]:
        fleet = EmulatedFleet(settings, rng=random.Random(1))
        await fleet.start()
        try:
            spoil(fleet)
            status = await asyncio.to_thread(main, ["doctor", *words(fleet)])
            return status, not fleet.idle, [one.url for one in fleet.engines]
        finally:
            await fleet.close()

    status, left, urls = asyncio.run(play())
    return Seen(status, capsys.readouterr().out, left, urls)


def bare(fleet: EmulatedFleet) -> list[str]:
    """Name the engines without their roles."""
    return [one.url for one in fleet.engines]


def told(fleet: EmulatedFleet) -> list[str]:
    """Name the engines with their roles, and their bootstrap servers."""
    ranks = dict.fromkeys(url.partition("@")[0] for url in fleet.decode_urls)
    roles = (("--prefill", fleet.prefill_urls), ("--decode", [*ranks]))
    words = [word for flag, urls in roles if urls for word in (flag, *urls)]
    if fleet.bootstrap_urls:
        words += ["--bootstrap", *fleet.bootstrap_urls]
    if fleet.settings.connector == "mooncake-layerwise":
        words += ["--connector", "mooncake-layerwise"]
    return words


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("mode", DpMode)
def test_every_pair_of_a_connector_is_tried_and_the_command_serves_it(
    connector: str, mode: DpMode, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(SMALL, connector=connector, dp_mode=mode, prefillers=2)
    seen = examine(settings, capsys, told)
    assert seen.status == 0, seen.text
    assert not seen.left
    decoders = 2 if mode is DpMode.PORTS else 1
    assert seen.text.count(f"tokens ({connector})") == 2 * decoders
    parsed = make_parser(["serve"]).parse_args(seen.serve[1:])
    config = make_config(None, flags_given(parsed))
    assert config.engines.connector == connector
    assert config.scheduling.batch == 16
    assert [one.url.base for one in config.prefillers] == seen.urls[:2]
    assert [one.url.base for one in config.decoders] == seen.urls[2:]
    assert all(one.discover is (mode is DpMode.HEADER) for one in config.decoders)


def test_roles_that_nothing_tells_are_taken_by_order_with_nixl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = examine(SMALL, capsys, bare)
    assert seen.status == 0, seen.text
    assert "the roles are taken by their order" in seen.text
    assert seen.serve[-5:] == ["--prefill", seen.urls[0], "--decode", *seen.urls[1:]]


def test_what_a_guess_left_behind_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(SMALL, ranks=1)
    seen = examine(
        settings, capsys, bare, lambda fleet: fleet.faults.set("decode/0", status_500=1.0)
    )
    assert seen.status == 1
    assert f"note: {seen.urls[0]} keeps a KV cache of 64 tokens" in seen.text


def test_engines_in_the_other_order_are_tried_the_other_way_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = examine(replace(SMALL, ranks=1), capsys, lambda fleet: bare(fleet)[::-1])
    assert seen.status == 0, seen.text
    assert seen.serve[-4:] == ["--prefill", seen.urls[0], "--decode", seen.urls[1]]
    assert not seen.left


def test_counters_tell_a_role_the_next_time(capsys: pytest.CaptureFixture[str]) -> None:
    async def both() -> None:
        fleet = EmulatedFleet(replace(SMALL, ranks=1), rng=random.Random(1))
        await fleet.start()
        words = bare(fleet)
        assert await asyncio.to_thread(main, ["doctor", *words]) == 0
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["doctor", *words[::-1], "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["engines"]
        assert [(row["role"], row["role_by"]) for row in rows] == [
            ("decode", "counters"),
            ("prefill", "counters"),
        ]
        await fleet.close()

    asyncio.run(both())


def test_no_request_is_sent_where_a_wrong_role_would_end_an_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = examine(replace(SMALL, connector="mooncake-ascend"), capsys, bare)
    assert seen.status == 1
    assert "do not tell their roles: say --prefill and --decode" in seen.text
    assert " -> " not in seen.text


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    seen = examine(SMALL, capsys, lambda fleet: [*bare(fleet), "--json"])
    found = json.loads(seen.text)
    assert found["healthy"] is True
    assert found["findings"] == []
    assert [row["role"] for row in found["engines"]] == ["prefill", "decode", "decode"]
    assert found["engines"][1] | {"url": "", "role_by": ""} == {
        "url": "",
        "role": "decode",
        "role_by": "",
        "version": "0.32.0",
        "models": ["emulated"],
        "max_model_len": 131_072,
        "connector": "nixl",
        "ranks": 1,
        "max_num_seqs": 16,
        "block_size": "32",
        "blocks": "None",
        "kv_tokens": None,
        "prefix_caching": None,
        "lease_s": None,
        "fault": None,
    }
    assert [pair["pulled"] for pair in found["pairs"]] == [True, True]
    assert found["serve"][:2] == ["balanceroute", "serve"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefillers": 0}, "no prefill engine is among them: name one, by --prefill URL"),
        ({"ranks": 0}, "no decode engine is among them: name one, by --decode URL"),
        ({"engine_models": {"decode/0": ("other",)}}, "serve other models: emulated and other"),
        ({"engine_versions": {"prefill/0": "0.31.0"}}, "NIXL refuses the pair"),
    ],
    ids=["decode only", "prefill only", "models", "versions"],
)
def test_what_does_not_fit_is_told_and_not_tried(
    settings: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = examine(replace(SMALL, **({"ranks": 1} | settings)), capsys, told)
    assert seen.status == 1
    assert words in seen.text
    assert "pulled the KV" not in seen.text
    assert not seen.left


def test_half_a_fleet_that_is_there_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    seen = examine(SMALL, capsys, told, lambda fleet: fleet.kill("decode/1"))
    assert seen.status == 1
    assert f"error: {seen.urls[2]}: /version: Connection refused: start it, or correct" in seen.text
    assert seen.serve[-4:] == ["--prefill", seen.urls[0], "--decode", seen.urls[1]]


def test_an_engine_that_fails_leaves_its_kv_cache_to_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = examine(SMALL, capsys, told, lambda fleet: fleet.faults.set("decode/0", status_500=1.0))
    assert seen.status == 1
    assert f"{seen.urls[0]} -> {seen.urls[1]}: {seen.urls[1]}: status 500" in seen.text
    assert not seen.left
    assert "keeps a KV cache" not in seen.text


def test_what_no_engine_pulls_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(SMALL, ranks=1)
    seen = examine(
        settings, capsys, told, lambda fleet: fleet.faults.set("decode/0", status_500=1.0)
    )
    assert seen.left
    assert f"note: {seen.urls[0]} keeps a KV cache of 64 tokens until its lease ends" in seen.text


def test_a_prefiller_that_leaves_no_kv_cache_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    seen = examine(
        SMALL, capsys, told, lambda fleet: fleet.faults.set("prefill/0", drop_kv_params=1.0)
    )
    assert seen.status == 1
    assert seen.text.count("the prefill answer has no kv_transfer_params") == 4  # Two pairs.


def test_a_pair_that_is_interrupted_is_tried_to_its_end() -> None:
    async def play() -> None:
        fleet = EmulatedFleet(replace(SMALL, ranks=1), rng=random.Random(1))
        await fleet.start()
        fleet.faults.set("decode/0", delay_s=10.0)  # Emulated ones.
        urls = [EngineUrl.parse(url) for url in bare(fleet)]
        task = asyncio.create_task(diagnose(urls, DoctorSettings()))
        while not fleet.stats()["leases"]["held"]:  # noqa: ASYNC110 - the fleet has no event.
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fleet.stats()["leases"] == {
            "pulled": 1,
            "released": 0,
            "expired": 0,
            "lost": 0,
            "held": 0,
        }
        await fleet.close()

    asyncio.run(play())


# What is no engine, or a broken one.

METRICS = (
    'vllm:kv_cache_usage_perc{engine="0"} 0\n'
    'vllm:cache_config_info{block_size="16",engine="0",enable_prefix_caching="True"} 1\n'
    "vllm:external_prefix_cache_hits_total 0\n"
)
KV = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 1,
}
PAGES = {
    "/version": '{"version": "0.31.0"}',
    "/v1/models": '{"data": [{"id": "m", "max_model_len": 1024}]}',
    "/metrics": METRICS + "vllm:nixl_num_descriptors_count 0\n",
    "/v1/completions": json.dumps({"usage": {"prompt_tokens": 70}, "kv_transfer_params": KV}),
}


@contextmanager
def answering(
    pages: dict[str, str],
    *,
    status: int = 200,
    headers: tuple[tuple[str, str], ...] = (),
    tls: ssl.SSLContext | None = None,
    held: Event | None = None,
) -> Iterator[str]:
    """Serve pages; yield the URL. With `held` no answer comes until it is set."""

    class Handler(Answering):
        def answer(self, body: bytes) -> None:
            del body
            if held is not None:
                held.wait(60)
            page = pages.get(self.path.partition("?")[0], pages.get("*"))
            self.send_response(404 if page is None else status)
            data = (page or "").encode()
            for name, value in (*headers, ("content-length", str(len(data)))):
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # Who asked may have had enough.
                self.wfile.write(data)

    with answered_by(Handler, tls) as url:
        try:
            yield url
        finally:
            if held is not None:
                held.set()


def doctor(*words: str) -> int:
    """Run the command."""
    return main(["doctor", *words])


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "html": ({"pages": {"*": "<html>hello</html>"}}, "give the address of a vLLM API server"),
    "401": ({"pages": PAGES, "status": 401}, "it wants a key: --engine-key-file FILE"),
    "403": ({"pages": PAGES, "status": 403}, "it wants a key: --engine-key-file FILE"),
    "redirect": (
        {"pages": PAGES, "status": 302, "headers": (("location", "http://x/"),)},
        "give the engine's own address, not that of a gateway",
    ),
    "huge": (
        {"pages": PAGES | {"/version": " " * (1 << 17)}},
        "the answer is larger than 65536 bytes",
    ),
    "huge metrics": (
        {"pages": PAGES | {"/metrics": METRICS + "#" * (5 << 20)}},
        "the answer is larger than 4194304 bytes",
    ),
    "500": ({"pages": PAGES, "status": 500}, "status 500: its log tells why"),
    "deep": ({"pages": PAGES | {"/version": "[" * 60_000}}, "give the address of a vLLM API"),
    "no model": ({"pages": PAGES | {"/v1/models": '{"data": []}'}}, "serves no model"),
    "proxy": (
        {"pages": PAGES | {"/metrics": "balanceroute_requests_total 1\n"}},
        "is a BalanceRoute proxy, no engine of vLLM: give the addresses of vLLM's engines",
    ),
    "router": (
        {"pages": PAGES | {"/metrics": "# nothing\n"}},
        "has no metrics of an engine of vLLM: is it a proxy or a router?",
    ),
    "sglang": (
        {"pages": {"/get_server_info": '{"disaggregation_mode": "prefill"}'}},
        "is an SGLang engine, no engine of vLLM",
    ),
    "vllm-router": (
        {"pages": {"/list_workers": '{"urls": ["http://e:1"]}'}},
        "is a router before other engines, no engine of vLLM: give the addresses",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_engine_is_told_with_the_cure(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words = BROKEN[kind]
    with answering(**options) as url:
        assert doctor(url) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"error: {url}: ") and words in line for line in lines), lines


def test_a_port_that_is_closed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert doctor(url.removeprefix("http://")) == 1
    assert f"error: {url}: /version: Connection refused: start it" in capsys.readouterr().out


def test_an_engine_that_is_slow_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balanceroute.proxy.cli.doctor.PAGE_S", 0.05)
    with answering(PAGES, held=Event()) as url:
        assert doctor(url) == 1
    assert "no complete answer within 0.05 s: it hangs or is loading" in capsys.readouterr().out


def test_tls_that_is_not_spoken_or_not_trusted_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(CERT)
    key.write_text(KEY)
    context.load_cert_chain(cert, key)
    with answering(PAGES) as plain, answering(PAGES, tls=context) as secured:
        assert doctor(plain.replace("http:", "https:"), secured) == 1
        said = capsys.readouterr().out
        assert "speaks no TLS: is it http://?: write http://" in said
        assert "--engine-ca-file names the authority to trust" in said
        local = secured.replace("127.0.0.1", "localhost")
        assert doctor(local, "--engine-ca-file", str(cert)) == 1
        assert f"{local}: role unknown: vLLM 0.31.0, m" in capsys.readouterr().out
    missing = str(tmp_path / "none")
    assert doctor("h:1", "--engine-ca-file", missing) == 2


def test_a_decode_engine_that_computes_the_prompt_again_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balanceroute.proxy.cli.doctor._LOOK_S", 0.0)
    with ExitStack() as stack:
        urls = [stack.enter_context(answering(PAGES)) for _ in range(2)]
        assert doctor("--prefill", urls[0], "--decode", urls[1]) == 1
    said = capsys.readouterr().out
    assert "the decode engine computed the prompt of 70 tokens again: both need" in said
    assert f"{urls[0]} keeps a KV cache of 70 tokens until its lease ends" in said


def test_counters_that_are_missing_decide_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    pages = PAGES | {"/metrics": 'vllm:kv_cache_usage_perc{engine="0"} 0\n'}
    with ExitStack() as stack:
        urls = [stack.enter_context(answering(pages)) for _ in range(2)]
        assert doctor("--prefill", urls[0], "--decode", urls[1]) == 0
    assert "counters do not tell whether it pulled" in capsys.readouterr().out


def info(connector: str, role: str, slots: int, **extra: object) -> str:
    """Return what vLLM's developer mode shows of an engine."""
    transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    config = {"kv_transfer_config": transfer, "scheduler_config": {"max_num_seqs": slots}}
    return json.dumps({"vllm_config": config, "vllm_env": {"VLLM_PORT": 1}})


def test_a_configuration_that_is_shown_decides(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                answering(
                    PAGES
                    | {"/server_info": info("NixlConnector", role, slots, kv_lease_duration=60)}
                )
            )
            for role, slots in (("kv_consumer", 24), ("kv_consumer", 32), ("kv_producer", 8))
        ]
        assert doctor(*urls, "--no-requests") == 1
    said = capsys.readouterr().out
    assert f"several max_num_seqs: 24 at {urls[0]}, 32 at {urls[1]}: start all" in said
    command = f"--batch 24 --lease-s 60 --prefill {urls[2]} --decode {urls[0]} {urls[1]}"
    assert said.splitlines()[-1] == f"balanceroute serve {command}"


FOREIGN = {
    "P2pNcclConnector": {"/server_info": info("P2pNcclConnector", "kv_producer", 8)},
    "LMCacheConnectorV1": {"/server_info": info("LMCacheConnectorV1", "kv_both", 8)},
    "LMCache": {"/metrics": METRICS + "lmcache:num_hit_tokens_total 1\n"},
    "no KV connector": {"/server_info": '{"vllm_config": {"kv_transfer_config": null}}'},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_connectors_that_are_not_served_are_named_and_not_tried(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = PAGES | {"/metrics": METRICS} | FOREIGN[name]
    with ExitStack() as stack:
        urls = [stack.enter_context(answering(pages)) for _ in range(2)]
        assert doctor("--prefill", urls[0], "--decode", urls[1]) == 1
    said = capsys.readouterr().out
    for url in urls:
        assert f"error: {url}: runs {name}: no connector that this proxy serves: start it" in said
    assert " -> " not in said
    assert "balanceroute serve" not in said


def test_lmcache_beside_nixl_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    pages = PAGES | {"/metrics": PAGES["/metrics"] + "lmcache:num_hit_tokens_total 1\n"}
    with answering(pages) as url:
        assert doctor(url) == 1
    assert "LMCache" not in capsys.readouterr().out


def test_what_an_engine_says_is_no_order_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    pages = PAGES | {"/version": json.dumps({"version": "\x1b[2J" + "9" * 5000})}
    with answering(pages) as url:
        assert doctor(url) == 1
    said = capsys.readouterr().out
    assert "vLLM ?[2J999" in said
    assert max(map(len, said.splitlines())) <= 600


def test_engines_that_contradict_each_other_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    other = {"/metrics": METRICS, "/server_info": info("MooncakeConnector", "kv_consumer", 8)}
    with answering(PAGES) as one, answering(PAGES | other) as two:
        assert doctor("--prefill", one, "--decode", two, "--no-requests") == 1
    said = capsys.readouterr().out
    assert f"have several connectors: nixl at {one}, mooncake at {two}: start all" in said
    assert "balanceroute serve" not in said


def test_an_engine_that_is_named_twice_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(PAGES) as url:
        assert doctor(url, url.replace("127.0.0.1", "localhost"), url, "--no-requests") == 1
    said = capsys.readouterr().out
    assert f"error: {url}: is named twice: name it once" in said
    assert f"is the same engine as {url}" in said


def test_a_key_is_sent_and_never_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALANCEROUTE_ENGINE_KEY", "very secret")
    assert doctor("h:1") == 2
    said = capsys.readouterr()
    assert "BALANCEROUTE_ENGINE_KEY" in said.err
    assert "very secret" not in said.out + said.err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "URL: 0 engines are named, must be from 1 to 512, as HOST:PORT .."),
        (["ftp://h:1"], "URL is 'ftp://h:1': it must begin with http:// or https://"),
        (["http://h:1/v1"], "it must end after the port"),
        (["http://u:p@h:1"], "must not carry credentials"),
        (["--prefill", "http://h:1", "--decode", "http://h:1"], "is named by --prefill too"),
        (["http://h:1", "--connector", "nicl"], "--connector is 'nicl', must be of nixl"),
        (["--prefill", "http://h:1", "--bootstrap", "http://h:2", "http://h:3"], "2 for 1"),
        (["http://h:1", "--request-timeout-s", "0"], "--request-timeout-s is 0"),
    ],
)
def test_usage_that_means_nothing_is_refused(
    words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*words) == 2
    said = capsys.readouterr().err
    assert fault in said
    assert said.count("\n") == 1


# `serve` asks in the same way.


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ProxyConfig, ServeCommand]]:
    """Return what was to be served, instead of serving it."""
    found: list[tuple[ProxyConfig, ServeCommand]] = []

    def serve(config: ProxyConfig, command: ServeCommand) -> int:
        found.append((config, command))
        return 0

    monkeypatch.setattr(live_serve, "serve", serve)
    return found


def pair(connector: str, role: str, slots: int) -> dict[str, str]:
    """Return the pages of an engine that tells its connector and its slots."""
    metrics = PAGES["/metrics"] if connector == "NixlConnector" else METRICS
    return PAGES | {"/metrics": metrics, "/server_info": info(connector, role, slots)}


def test_serve_takes_what_engines_tell_and_says_so(
    served: list[tuple[ProxyConfig, ServeCommand]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(answering(pair("MooncakeConnector", "kv_both", slots)))
            for slots in (8, 24, 24)
        ]
        words = ["serve", "--prefill", engines[0], "--decode", *engines[1:]]
        assert main(words) == 0
        assert main([*words, "--batch", "7"]) == 0
        assert main([*words, "--batch", "7", "--connector", "nixl"]) == 0
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        assert main(words) == 0
        assert capsys.readouterr().out == "the engines tell: --connector mooncake --batch 24\n"
    found = [(one.engines.connector, one.scheduling.batch) for one, _ in served[:3]]
    assert found == [("mooncake", 24), ("mooncake", 7), ("nixl", 7)]
    told = [dict(command.from_engines) for _, command in served[:3]]
    assert told == [{"connector": "mooncake", "batch": 24}, {"connector": "mooncake"}, {}]
    assert served[0][0].prefillers[0].bootstrap == EngineUrl("http", "127.0.0.1", 8998)


def test_serve_takes_the_slots_of_engines_that_refuse_more(
    served: list[tuple[ProxyConfig, ServeCommand]],
) -> None:
    async def play() -> None:
        fleet = EmulatedFleet(SMALL, rng=random.Random(1))
        await fleet.start()
        words = ["serve", "--prefill", *fleet.prefill_urls, "--decode", *fleet.decode_urls]
        assert await asyncio.to_thread(main, words) == 0
        assert fleet.idle
        await fleet.close()

    asyncio.run(play())
    assert served[0][0].scheduling.batch == 16
    assert served[0][1].from_engines == {"connector": "nixl", "batch": 16}


@pytest.mark.parametrize(
    ("pages", "fault"),
    [
        (
            [pair("NixlConnector", "kv_both", 8), pair("MooncakeConnector", "kv_both", 8)] * 2,
            "--connector: the engines have several connectors (nixl at ",
        ),
        (
            [pair("NixlConnector", "kv_both", slots) for slots in (8, 8, 16)],
            "--batch: the engines have several max_num_seqs (8 at ",
        ),
    ],
    ids=["connectors", "slots"],
)
def test_serve_refuses_engines_that_contradict_each_other(
    pages: list[dict[str, str]],
    fault: str,
    served: list[tuple[ProxyConfig, ServeCommand]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(answering(one)) for one in pages]
        assert main(["serve", "--prefill", urls[0], "--decode", *urls[1:]]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"balanceroute: {fault}")
    assert said.endswith("): start all alike, or name one\n")
    assert said.count("\n") == 1
    assert served == []


def test_serve_waits_for_nobody(
    served: list[tuple[ProxyConfig, ServeCommand]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("balanceroute.proxy.cli.running_engines._ASK_S", 0.05)
    with answering(PAGES, held=Event()) as silent, answering({"*": "<html>"}) as strange:
        assert main(["serve", "--prefill", silent, "--decode", strange, "http://127.0.0.1:1"]) == 0
    assert capsys.readouterr().err == ""
    config = served[0][0]
    assert (config.engines.connector, config.scheduling.batch) == ("nixl", 256)
