"""`balanceroute serve --http3` as a process: the same answers as over HTTP/1.1, keys, renewal, drain."""

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.served import COMPLETIONS, STREAM, engines, play, serving, until_draining
from tests.support.certificate import make_certificate

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

JSON: "Headers" = [(b"content-type", b"application/json")]
# Of each answer its own, or of one protocol alone.
OWN = {b"x-request-id", b"transfer-encoding", b"date"}


def test_nothing_of_http3_is_loaded_where_it_is_off() -> None:
    program = """
import sys
import balanceroute.proxy.live.serve, balanceroute.proxy.live.settings.configure, balanceroute.proxy.lab.replay.driver
print(*sorted(name for name in sys.modules if "aioquic" in name or "http3." in name or name == "pylsqpack"))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


def test_orders_are_taken_over_http3(tmp_path: Path) -> None:
    pytest.importorskip("aioquic", reason="needs the extra h3")
    from tests.http3_client import http3_client  # noqa: PLC0415 - an extra.

    cert, key = make_certificate(tmp_path)
    flags = ["--http3", "--tls-cert", str(cert), "--tls-key", str(key), "--control-on-api-port"]
    for flag, secret in (("--admin-token-file", "token"), ("--api-key-file", "key")):
        path = tmp_path / secret
        path.touch(0o600)
        path.write_text(secret)
        flags += [flag, str(path)]

    async def main() -> None:
        trusting = ssl.create_default_context(cafile=str(cert))
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, *flags, context=trusting) as served,
        ):
            public, _ = served.ports()
            async with http3_client(public, cert.read_text()) as client:
                for key, status in ((b"token", 200), (b"key", 403), (b"other", 401)):
                    given: Headers = [(b"authorization", b"Bearer " + key)]
                    for path in (b"/pause?engines=false", b"/resume?engines=false"):
                        assert (await client.ask(b"POST", path, given, b"")).status == status
                    answer = await client.ask(b"GET", b"/workers", given, b"")
                    assert answer.status == status

    play(main())


def test_http3_gives_the_answers_of_http1(tmp_path: Path) -> None:
    pytest.importorskip("aioquic", reason="needs the extra h3")
    from tests.http3_client import http3_client  # noqa: PLC0415 - an extra.

    cert, key = make_certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    flags = ["--http3", "--tls-cert", str(cert), "--tls-key", str(key), "--api-key-file", str(keys)]
    authorised: Headers = [*JSON, (b"authorization", b"Bearer secret")]
    asked = [STREAM | {"stream": False, "prompt": f"t{n}", "seed": n} for n in range(8)]
    asked += [STREAM | {"prompt": f"t{n}", "seed": n, "max_tokens": 9} for n in range(8)]
    asked += [{"model": "other"}, {"model": "tiny", "prompt": 7}]

    async def main() -> None:
        trusting = ssl.create_default_context(cafile=str(cert))
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, *flags, context=trusting) as served,
        ):
            public, _ = served.ports()
            async with http3_client(public, cert.read_text()) as client:
                for values in asked:
                    named = [*authorised, (b"x-request-id", b"same")]
                    body = json.dumps(values).encode()
                    one = await served.client.send(b"POST", COMPLETIONS, values, named).end()
                    other = await client.ask(b"POST", COMPLETIONS.encode(), named, body)
                    assert other.status == one.status
                    assert _steady(bytes(other.body)) == _steady(one.body)
                    assert set(dict(other.headers)) - OWN == set(dict(one.headers)) - OWN
                    assert one.header(b"alt-svc") == b'h3=":%d"; ma=86400' % public
                refused = await client.ask(b"POST", COMPLETIONS.encode(), JSON, b"{}")
                assert refused.status == 401
                socket = [(b":protocol", b"websocket"), (b"sec-websocket-version", b"13")]
                number = client.begin(b"CONNECT", b"/v1/responses", socket, end=False)
                answer = await client.answer(number)
                assert answer.status == 426
                assert b"POST the same request" in answer.body
                number = client.begin(b"CONNECT", b"/health", socket, end=False)
                assert (await client.answer(number)).status == 405
                # It ends its streams before the process does.
                number = client.begin(b"POST", COMPLETIONS.encode(), authorised, end=False)
                client.more(number, json.dumps(STREAM).encode())
                while not client.streams[number].body:  # noqa: ASYNC110 (no event tells)
                    await asyncio.sleep(0)
                served.process.send_signal(signal.SIGTERM)
                await until_draining(served)
                answer = await client.answer(number)
                assert bytes(answer.body).endswith(b"data: [DONE]\n\n")
                await client.wait_closed()
            assert await served.exit() == (0, "")

    play(main())


@pytest.mark.parametrize(("host", "others"), [("::", 1), ("0.0.0.0", 0)])  # noqa: S104
def test_every_interface_is_that_of_both_families_over_http3_too(
    tmp_path: Path, host: str, others: int
) -> None:
    pytest.importorskip("aioquic", reason="needs the extra h3")
    from tests.http3_client import http3_client  # noqa: PLC0415 - an extra.

    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    cert, key = make_certificate(tmp_path)
    flags = ["--host", host, "--http3", "--tls-cert", str(cert), "--tls-key", str(key)]

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
        ):
            public, _ = served.ports()
            for address in ["127.0.0.1", "::1"][: 1 + others]:
                async with http3_client(public, cert.read_text(), address=address) as client:
                    assert (await client.ask(b"GET", b"/health", [], b"")).status == 200
            if not others:
                with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as free:
                    free.bind(("::1", public))
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())


def _steady(body: bytes) -> bytes:
    """Return a body without the time at which it was made."""
    parts = body.split(b'"created":')
    return b"".join([parts[0], *(part.lstrip(b" 0123456789") for part in parts[1:])])


def test_a_new_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    pytest.importorskip("aioquic", reason="needs the extra h3")
    from tests.http3_client import http3_client  # noqa: PLC0415 - an extra.

    cert, key = make_certificate(tmp_path)
    flags = ["--http3", "--tls-cert", str(cert), "--tls-key", str(key)]

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
        ):
            public, _ = served.ports()
            before = cert.read_text()
            async with http3_client(public, before) as first:
                make_certificate(tmp_path)
                served.process.send_signal(signal.SIGHUP)
                while True:
                    try:
                        async with http3_client(public, cert.read_text()) as second:
                            assert (await second.ask(b"GET", b"/v1/models")).status == 200
                            break
                    except ConnectionError:
                        continue  # The old one still.
                # One that is open goes on.
                assert (await first.ask(b"GET", b"/v1/models")).status == 200

    play(main())
