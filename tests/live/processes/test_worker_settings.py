"""`balanceroute serve --workers` with TLS and keys, and with words for how many."""

import asyncio
import os
import signal
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.certificate import make_certificate
from tests.live.served import COMPLETIONS, HOST, STREAM, Client, Served, engines, play, serving
from tests.live.settings.configs import of_flags

from balanceroute.proxy.live.supervise import workers_of

if TYPE_CHECKING:
    from tests.live.conftest import MakeExchanged

# So many that all go to one of two relays with a probability of 2 ** -11.
CONNECTIONS = 12


def any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def statuses(served: Served, make: "MakeExchanged", key: bytes) -> set[int]:
    """Ask with a key over many connections, and the administrators' listener."""
    headers = [(b"authorization", b"Bearer " + key)]
    clients = [Client(served.ports()[0], make, any_certificate()) for _ in range(CONNECTIONS)]
    found = {
        (await one.send(b"GET", "/v1/models", headers=headers).end()).status for one in clients
    }
    for one in clients:
        one.close()
    admin = await served.admin.send(b"GET", "/admin/state", headers=headers).end()
    return found | {admin.status}


async def shown(served: Served) -> set[str]:
    """Return the certificates that are shown to many connections."""
    there = (HOST, served.ports()[0])
    return {await asyncio.to_thread(ssl.get_server_certificate, there) for _ in range(CONNECTIONS)}


def times_logged(log: Path, words: str) -> int:
    return log.read_text().count(words)


async def until_logged(log: Path, words: str, count: int) -> None:
    while times_logged(log, words) < count:  # noqa: ASYNC110 - other processes write it.
        await asyncio.sleep(0.005)


def test_every_process_reads_certificates_and_keys_again(
    make_exchanged: "MakeExchanged", tmp_path: Path
) -> None:
    cert, key = make_certificate(tmp_path)
    log, keys, token = tmp_path / "log", tmp_path / "keys", tmp_path / "token"
    files = {"--api-key-file": keys, "--admin-token-file": token}
    files |= {"--tls-cert": cert, "--tls-key": key, "--log": log}
    for path in (keys, token):
        path.write_text("first\n")
        path.chmod(0o600)

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(
                make_exchanged,
                fleet.prefill_urls,
                fleet.decode_urls,
                "--workers=2",
                *(str(word) for pair in files.items() for word in pair),
                context=any_certificate(),
            ) as served,
        ):
            before = cert.read_text()
            headers = [(b"authorization", b"Bearer first")]
            long = served.client.send(b"POST", COMPLETIONS, STREAM | {"max_tokens": 400}, headers)
            await long.until_events(3)
            assert await shown(served) == {before}
            assert await statuses(served, make_exchanged, b"first") == {200}
            make_certificate(tmp_path)
            for path in (keys, token):
                path.write_text("second\n")
            served.process.send_signal(signal.SIGHUP)
            await until_logged(log, "were read again", 3)
            assert await shown(served) == {cert.read_text()} != {before}
            assert await statuses(served, make_exchanged, b"first") == {401}
            assert await statuses(served, make_exchanged, b"second") == {200}
            # One bad file, and all stays as it is everywhere.
            after = cert.read_text()
            make_certificate(tmp_path)
            keys.write_text("third\n")
            token.write_text("fourth fourth\n")
            served.process.send_signal(signal.SIGHUP)
            await until_logged(log, "stay as they are", 3)
            assert await shown(served) == {after}
            assert await statuses(served, make_exchanged, b"second") == {200}
            assert await statuses(served, make_exchanged, b"third") == {401}
            # So if relays alone can serve with it.
            token.write_text("third\n")
            cert.write_text("no certificate\n")
            served.process.send_signal(signal.SIGHUP)
            await until_logged(log, "stay as they are", 6)
            assert await statuses(served, make_exchanged, b"second") == {200}
            assert await statuses(served, make_exchanged, b"third") == {401}
            await long.end()
            assert long.done
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())


@pytest.mark.parametrize(("cores", "relays"), [(1, 1), (2, 1), (3, 2), (64, 63)])
def test_auto_is_a_relay_on_each_core_but_one(
    cores: int, relays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert workers_of(of_flags(workers="auto")) == relays
    assert workers_of(of_flags(workers=2)) == 2


def test_auto_serves(make_exchanged: "MakeExchanged") -> None:
    async def main() -> None:
        async with (
            engines() as fleet,
            serving(
                make_exchanged, fleet.prefill_urls, fleet.decode_urls, "--workers=auto"
            ) as served,
        ):
            assert (await served.client.post(COMPLETIONS, STREAM)).done
            page = (await served.admin.get("/metrics")).body.decode()
            assert page.count("process_cpu_seconds_total{") == 3
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])  # However many the machine has.
    try:
        play(main())
    finally:
        os.sched_setaffinity(0, cores)
