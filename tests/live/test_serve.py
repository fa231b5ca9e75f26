"""`balanceroute serve` as a process on real sockets: start, drain, cut, TLS."""

import asyncio
import json
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.live.served import (
    COMPLETIONS,
    HOST,
    PATIENCE_S,
    STREAM,
    Client,
    command,
    engines,
    plain_environment,
    play,
    serving,
    until_draining,
    until_unready,
)
from tests.support.certificate import make_certificate
from tests.support.played import in_real_time

from balanceroute.predictors import Survival
from balanceroute.predictors.files import load
from balanceroute.predictors.past import read_log
from balanceroute.proxy.lab.emulate import engine as emulated_engine
from balanceroute.proxy.wire.http1.server import Server

# Life.


@in_real_time()
async def test_it_says_when_it_is_ready_and_serves() -> None:
    async with (
        engines() as fleet,
        serving(fleet.prefill_urls, fleet.decode_urls) as served,
    ):
        public, admin = served.ports()
        assert served.line == f"listening on http://{HOST}:{public}, admin on http://{HOST}:{admin}"
        exchange = await served.client.post(COMPLETIONS, STREAM)
        assert exchange.done
        assert len(exchange.events) == 61
        for client in (served.client, served.admin):
            for page in ("/health", "/ready", "/metrics"):
                assert (await client.get(page)).status == 200
        state = (await served.admin.get("/admin/state")).json["state"]
        assert state["steps"] > 0
        served.process.send_signal(signal.SIGINT)
        assert await served.exit() == (0, "")
        assert fleet.stats()["leases"]["pulled"] == 1


@in_real_time()
async def test_it_is_not_ready_before_an_engine_of_each_role_was_probed() -> None:
    with socket.create_server((HOST, 0)) as silent:  # It takes connections and says nothing.
        url = f"http://{HOST}:{silent.getsockname()[1]}"
        async with (
            engines() as fleet,
            serving(
                [url],
                fleet.decode_urls,
                *("--health-timeout-s", "60", "--no-check-pairs"),
            ) as served,
        ):
            for client in (served.client, served.admin):
                for _ in range(3):
                    assert (await client.get("/ready")).status == 503
                    assert (await client.get("/health")).status == 200
            refused = await served.client.post(COMPLETIONS, STREAM)
            assert refused.status == 503
            served.process.send_signal(signal.SIGTERM)
            assert (await served.exit())[0] == 0


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def answers(host: str, port: int, context: ssl.SSLContext | None = None) -> bool:
    """Return whether somebody serves there; False if the connection is refused."""
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except ConnectionRefusedError:
        return False
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    await reader.read()
    writer.close()
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    ("host", "shown", "ipv4", "ipv6"),
    [
        ("::", "[::]", True, True),
        ("::1", "[::1]", False, True),
        ("0.0.0.0", "0.0.0.0", True, False),  # noqa: S104 - what is tried.
        ("127.0.0.1", "127.0.0.1", True, False),
    ],
)
def test_every_interface_is_that_of_both_families(
    tmp_path: Path,
    host: str,
    shown: str,
    ipv4: bool,
    ipv6: bool,
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    flags = ["--host", host, "--admin-host", host, "--admin-token-file", str(token)]

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
        ):
            public, admin = served.ports()
            urls = [word.rpartition(" ")[2] for word in served.line.split(", ")]
            assert urls == [f"http://{shown}:{public}", f"http://{shown}:{admin}"]
            assert [urlsplit(url).port for url in urls] == [public, admin]
            assert {urlsplit(url).hostname for url in urls} == {host}
            for port in (public, admin):
                assert await answers("127.0.0.1", port) == ipv4
                assert await answers("::1", port) == ipv6
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_port_that_one_family_has_already_is_refused() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 - what is tried.
        port = str(taken.getsockname()[1])
        words = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
        ran = subprocess.run(
            command(*words, "--host", "::", "--port", port, "--no-admin"),
            capture_output=True,
            text=True,
            env=plain_environment(),
            timeout=PATIENCE_S,
            check=False,
        )
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1] == (
        f"balanceroute: --host :: --port {port}: Address already in use"
    )


@in_real_time()
async def test_a_process_that_its_engines_call_back_stays_and_says_why() -> None:
    flags = ("--connector", "mooncake-layerwise", "--log", "-")
    async with (
        engines(connector="mooncake-layerwise") as fleet,
        serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
    ):
        served.process.send_signal(signal.SIGUSR2)
        assert (await served.client.post(COMPLETIONS, STREAM)).done
        served.process.send_signal(signal.SIGTERM)
        status, said = await served.exit()
        assert status == 0
        assert "no new version can take over" in said
        assert "decode ranks call the process back" in said
        assert said.count('"event":"serving"') == 1


def test_sigterm_lets_a_running_stream_finish(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, "--log", str(log)) as served,
        ):
            exchange = served.client.send(b"POST", COMPLETIONS, STREAM)
            await exchange.until_events(3)
            served.process.send_signal(signal.SIGTERM)
            await until_draining(served)
            assert not exchange.over
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(HOST, served.ports()[0])
            await exchange.end()
            assert exchange.done
            assert len(exchange.events) == 61
            assert await served.exit() == (0, "")
            assert all(engine.idle for engine in fleet.engines)

    play(main())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # Nothing said that it had come to its end.
    assert lines[-1]["message"] == "stopped"
    (request,) = [line for line in lines if "outcome" in line]
    assert (request["outcome"], request["output_tokens"]) == ("ok", 60)


def test_what_it_learned_is_kept_and_its_log_is_read_for_training(tmp_path: Path) -> None:
    log, state = tmp_path / "log", tmp_path / "state.json"
    flags = ["--log", str(log), "--predictor", "survival", "--predictor-state", str(state)]
    flags += ["--shadow-predictor", "exact-match"]

    async def main() -> None:
        for _ in range(2):
            async with (
                engines() as fleet,
                serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
            ):
                assert (await served.client.post(COMPLETIONS, STREAM)).done
                served.process.send_signal(signal.SIGTERM)
                assert await served.exit() == (0, "")

    play(main())
    assert load(state).state() == Survival([60, 60]).state()
    # The process log stands in between.
    first, second = read_log(log)
    assert (first.output_tokens, first.features.max_tokens) == (60, 60)
    assert first.features.keys
    assert first.features == second.features


@in_real_time()
async def test_it_samples_the_loads_of_its_ledger(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    flags = ["--load-log", str(path), "--load-log-interval-s", "0.01"]
    async with (
        engines() as fleet,
        serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
    ):
        assert (await served.client.post(COMPLETIONS, STREAM)).done
        served.process.send_signal(signal.SIGTERM)
        assert await served.exit() == (0, "")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(list(sample["loads"]) == fleet.decode_urls for sample in samples)
        loads = [load for sample in samples for load in sample["loads"].values()]
        assert max(tokens for tokens, *_ in loads) > 3


@in_real_time()
async def test_a_second_sigterm_cuts_it_truthfully() -> None:
    async with (
        engines() as fleet,
        serving(fleet.prefill_urls, fleet.decode_urls) as served,
    ):
        exchange = served.client.send(b"POST", COMPLETIONS, STREAM | {"max_tokens": 5_000})
        whole = served.client.send(
            b"POST", COMPLETIONS, STREAM | {"max_tokens": 5_000, "stream": False}
        )
        await exchange.until_events(3)
        served.process.send_signal(signal.SIGTERM)
        await until_draining(served)
        served.process.send_signal(signal.SIGTERM)
        await exchange.end()
        assert exchange.status == 200
        assert exchange.error is not None
        assert exchange.chunks[-1]["error"]["code"] == 503
        assert "shutting down" in exchange.chunks[-1]["error"]["message"]
        assert b"[DONE]" not in exchange.body
        await whole.end()
        assert whole.status == 503
        assert await served.exit() == (0, "")
        while not all(engine.idle for engine in fleet.engines):  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)


UPLOAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
    b"Expect: 100-continue\r\n\r\n"
)


def samples(page: bytes, family: str) -> dict[str, float]:
    """Return the samples of a family on a page of metrics, by their labels."""
    lines = [line.decode().removeprefix(family) for line in page.split(b"\n")]
    found = [line.rpartition(" ") for line in lines if line.startswith(("{", " "))]
    return {labels: float(value) for labels, _, value in found}


def test_it_serves_and_says_so_when_more_connect_than_it_has_descriptors_for(
    tmp_path: Path,
) -> None:
    """70 silent connections at 64 descriptors closed both ports, without a word."""
    log = tmp_path / "log"

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(
                fleet.prefill_urls,
                fleet.decode_urls,
                # Which would need more for each client.
                *("--log", str(log), "--native", "off"),
                descriptors=64,
            ) as served,
        ):
            exchange = served.client.send(b"POST", COMPLETIONS, STREAM | {"max_tokens": 600})
            await exchange.until_events(1)
            silent = []
            for _ in range(10):
                silent += [await asyncio.open_connection(HOST, served.ports()[0]) for _ in range(7)]
                # Not more at a time than the kernel keeps for the proxy.
                assert (await served.admin.get("/health")).status == 200
            # Who asks something is served, in the place of one that does not.
            assert (await served.client.post(COMPLETIONS, STREAM)).done
            busy = []
            while True:
                reader, writer = await asyncio.open_connection(HOST, served.ports()[0])
                writer.write(UPLOAD)
                line = await reader.readline()
                if line != b"HTTP/1.1 100 Continue\r\n":
                    break
                busy.append(writer)
            assert line == b"HTTP/1.1 503 Service Unavailable\r\n"
            assert b"too many connections" in await reader.read()
            writer.close()
            # The admin listener has a share of its own.
            for page in ("/health", "/ready"):
                assert (await served.admin.get(page)).status == 200
            metrics = (await served.admin.get("/metrics")).body
            rejected = samples(metrics, "balanceroute_rejected_connections_total")
            assert rejected == {'{reason="limit"}': 1, '{reason="peer"}': 0}
            assert samples(metrics, "balanceroute_evicted_connections_total")[""] > 60
            assert samples(metrics, "balanceroute_descriptor_shortages_total") == {"": 0}
            assert exchange.status == 200
            await exchange.end()
            assert exchange.done
            for writer in (*busy, *(writer for _, writer in silent)):
                writer.close()
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (serving_line,) = [line for line in lines if line.get("message") == "serving"]
    assert (serving_line["descriptors"], serving_line["connection_limit"]) == (64, 10)
    told = [line for line in lines if "connections were rejected" in line.get("message", "")]
    assert [(line["level"], line["reason"], line["count"]) for line in told] == [
        ("warning", "limit", 1)
    ]


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_is_told_in_one_line(flag: str) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--prefill", f"http://{HOST}:9", "--decode", f"http://{HOST}:10"]
        ports = {"--port": "0", "--admin-port": "0"} | {flag: str(port)}
        ended = subprocess.run(
            command(*words, *(word for pair in ports.items() for word in pair), "--log", "none"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=plain_environment(),
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    flags = f"{flag.replace('port', 'host')} {HOST} {flag} {port}"
    assert line == f"balanceroute: {flags}: Address already in use"
    assert str(port) in line


# TLS.


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a self-signed certificate for loopback, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[Path, Path]], None]:
    """Make emulated engines serve https."""

    def with_certificate(certificate: tuple[Path, Path]) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)

        class TlsServer(Server):
            async def start(self, host: str, port: int, **options: Any) -> None:
                await super().start(host, port, **options, ssl=context)

        monkeypatch.setattr(emulated_engine, "Server", TlsServer)

    return with_certificate


def https(urls: list[str]) -> list[str]:
    return [url.replace("http:", "https:") for url in urls]


def test_tls_on_both_sides(
    certificate: tuple[Path, Path],
    tls_engines: Callable[[tuple[Path, Path]], None],
) -> None:
    cert, key = certificate
    tls_engines(certificate)
    flags = ["--engine-ca-file", str(cert), "--tls-cert", str(cert), "--tls-key", str(key)]
    flags += ["--health-interval-s", "0.1", "--scrape-interval-s", "0.1"]

    async def main() -> None:
        trusting = ssl.create_default_context(cafile=str(cert))
        async with (
            engines() as fleet,
            serving(
                https(fleet.prefill_urls),
                https(fleet.decode_urls),
                *flags,
                context=trusting,
            ) as served,
        ):
            public, _ = served.ports()
            assert served.line.startswith(f"listening on https://{HOST}:{public},")
            exchange = await served.client.post(COMPLETIONS, STREAM)
            assert exchange.done
            assert len(exchange.events) == 61
            # Who does not know the certificate, or speaks no TLS, gets nothing.
            stranger = Client(public, ssl.create_default_context())
            assert (await stranger.get("/health")).error is not None
            plain = Client(public)
            assert (await plain.get("/health")).error is not None
            # Health checks and scrapes speak TLS, too.
            page = b'balanceroute_scrape_failures_total{role="prefill",url="https://'
            state = (await served.admin.get("/admin/state")).json["state"]
            assert {one["status"] for one in state["ranks"] + state["prefillers"]} == {"up"}
            assert page in (await served.admin.get("/metrics")).body
            stranger.close()
            plain.close()
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())


def is_logged(log: Path, words: bytes) -> bool:
    return words in log.read_bytes()


async def status_of(client: Client, path: str, key: bytes) -> int:
    """Get a page with a key."""
    headers = [(b"authorization", b"Bearer " + key)]
    return (await client.send(b"GET", path, headers=headers).end()).status


def test_certificates_and_keys_are_read_again_on_sighup(tmp_path: Path) -> None:
    """A renewed certificate, and new keys, needed a restart that ends all streams."""
    cert, key = make_certificate(tmp_path)
    log, keys, token = tmp_path / "log", tmp_path / "keys", tmp_path / "token"
    files = {"--api-key-file": keys, "--admin-token-file": token}
    files |= {"--tls-cert": cert, "--tls-key": key, "--log": log}
    for path in (keys, token):
        path.write_text("first\n")
        path.chmod(0o600)

    async def main() -> None:
        any_certificate = ssl.create_default_context()
        any_certificate.check_hostname = False
        any_certificate.verify_mode = ssl.CERT_NONE
        async with (
            engines() as fleet,
            serving(
                fleet.prefill_urls,
                fleet.decode_urls,
                *(str(word) for pair in files.items() for word in pair),
                context=any_certificate,
            ) as served,
        ):
            there = (HOST, served.ports()[0])

            async def shown() -> str:
                return await asyncio.to_thread(ssl.get_server_certificate, there)

            async def statuses(key: bytes) -> tuple[int, int]:
                public = await status_of(served.client, "/v1/models", key)
                return public, await status_of(served.admin, "/admin/state", key)

            before = cert.read_text()
            assert await shown() == before
            assert await statuses(b"first") == (200, 200)
            assert await statuses(b"second") == (401, 401)
            make_certificate(tmp_path)
            for path in (keys, token):
                path.write_text("second\n")
            served.process.send_signal(signal.SIGHUP)
            while not is_logged(log, b"were read again"):  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0)
            assert await statuses(b"first") == (401, 401)
            assert await statuses(b"second") == (200, 200)
            assert await shown() == cert.read_text() != before
            # One bad file, and all stays as it is.
            after = cert.read_text()
            make_certificate(tmp_path)
            keys.write_text("third\n")
            token.write_text("fourth fourth\n")
            served.process.send_signal(signal.SIGHUP)
            while not is_logged(log, b"stay as they are"):  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0)
            assert await statuses(b"second") == (200, 200)
            assert await statuses(b"third") == (401, 401)
            assert await shown() == after
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())
    text = log.read_text()
    (told,) = [line for line in map(json.loads, text.splitlines()) if "stay as" in line["message"]]
    assert (told["level"], told["reason"]) == (
        "error",
        f"--admin-token-file is {token}: line 1: a key has 1 to 1024 visible ASCII characters",
    )
    assert not {"first", "second", "third", "fourth"} & set(text.replace('"', " ").split())


@in_real_time()
async def test_a_second_sigterm_refuses_what_waits_for_a_prefiller() -> None:
    async with AsyncExitStack() as stack:
        async with engines() as fleet:
            served = await stack.enter_async_context(serving(fleet.prefill_urls, fleet.decode_urls))
            assert (await served.admin.get("/ready")).status == 200
        exchange = served.client.send(b"POST", COMPLETIONS, STREAM)
        # It waits for a prefiller to come back; who comes later is refused.
        await until_unready(served)
        assert (await served.client.post(COMPLETIONS, STREAM)).status == 503
        served.process.send_signal(signal.SIGTERM)
        await until_draining(served)
        served.process.send_signal(signal.SIGTERM)
        assert (await exchange.end()).status == 503
        assert await served.exit() == (0, "")


def test_an_engine_whose_certificate_is_not_trusted_gets_no_request(
    certificate: tuple[Path, Path],
    tls_engines: Callable[[tuple[Path, Path]], None],
) -> None:
    tls_engines(certificate)

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(https(fleet.prefill_urls), https(fleet.decode_urls)) as served,
        ):
            # Its first probes have told it so.
            assert (await served.admin.get("/ready")).status == 503
            refused = await served.client.post(COMPLETIONS, STREAM)
            assert refused.status == 503
            served.process.send_signal(signal.SIGTERM)
            assert fleet.stats()["leases"]["held"] == 0
            assert await served.exit() == (0, "")

    play(main())


def test_https_engines_can_join_http_ones(
    certificate: tuple[Path, Path],
    tls_engines: Callable[[tuple[Path, Path]], None],
) -> None:
    tls_engines(certificate)
    nobody = [f"http://{HOST}:9"], [f"http://{HOST}:10"]

    async def main() -> None:
        trust = ("--engine-ca-file", str(certificate[0]))
        async with engines() as fleet, serving(*nobody, *trust) as served:
            roles = {"prefill": fleet.prefill_urls, "decode": fleet.decode_urls}
            for role, urls in roles.items():
                for url in https(urls):
                    order = {"role": role, "url": url}
                    added = await served.admin.post("/admin/instances", order)
                    assert added.status == 200, added.body
            exchange = await served.client.post(COMPLETIONS, STREAM)
            assert exchange.done
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())
