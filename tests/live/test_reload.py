"""Keys, certificates and tenants that are read again while some of them are bad: `balanceroute serve` as a process."""

import asyncio
import json
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.live.served import COMPLETIONS, HOST, STREAM, engines, play, serving
from tests.support.certificate import make_certificate

if TYPE_CHECKING:
    from tests.live.served import Client, Served

_TENANTS = """
[[tenant]]
name = "{name}"
key_file = "{keys}"
default = true
"""


class Files:
    """What the proxy reads, of one generation."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = make_certificate(folder)
        self.keys, self.token, self.engine = (folder / name for name in ("keys", "token", "engine"))
        self.tenant_keys, self.tenants = folder / "tenant_keys", folder / "tenants"
        self.write("first")

    @property
    def flags(self) -> list[str]:
        named = {
            "--api-key-file": self.keys,
            "--admin-token-file": self.token,
            "--engine-key-file": self.engine,
            "--tenants": self.tenants,
            "--tls-cert": self.cert,
            "--tls-key": self.key,
        }
        return [str(word) for pair in named.items() for word in pair]

    def write(self, word: str) -> None:
        for path in (self.keys, self.token, self.engine):
            path.write_text(f"{word}\n")
        self.tenant_keys.write_text(f"of-{word}\n")
        self.tenants.write_text(_TENANTS.format(name=word, keys=self.tenant_keys))
        for path in (self.keys, self.token, self.engine, self.tenant_keys):
            path.chmod(0o600)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _ways_to_spoil(files: Files, other_key: Path) -> list[Callable[[], object]]:
    return [
        lambda: _empty(files.keys),
        files.keys.unlink,
        lambda: files.token.write_text("half of a"),
        lambda: _empty(files.token),
        lambda: _empty(files.engine),
        lambda: _empty(files.tenants),
        lambda: _half(files.tenants),
        files.tenants.unlink,
        files.tenant_keys.unlink,
        lambda: _half(files.cert),
        lambda: _empty(files.cert),
        lambda: _half(files.key),
        files.key.unlink,
        lambda: files.key.write_bytes(other_key.read_bytes()),
    ]


async def _holds(served: "Served", word: bytes, cert: str) -> bool:
    """Return whether new requests and handshakes meet this generation alone."""
    there = (HOST, served.ports()[0])
    shown = await asyncio.to_thread(ssl.get_server_certificate, there)
    found = [
        await _status(client, path, key)
        for key in (b"first", b"second")
        for client, path in ((served.client, "/v1/models"), (served.admin, "/admin/state"))
    ]
    of_tenant = await _status(served.client, "/v1/models", b"of-" + word)
    expected = [200, 200, 401, 401] if word == b"first" else [401, 401, 200, 200]
    return (shown, found, of_tenant) == (cert, expected, 200)


def test_the_old_ones_stay_in_force_while_any_new_one_is_bad(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    other.mkdir()
    files = Files(tmp_path)
    bad = _ways_to_spoil(files, make_certificate(other)[1])
    flags = [*files.flags, "--log", str(log)]

    async def told(words: bytes, count: int) -> None:
        while log.read_bytes().count(words) < count:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)

    async def main() -> None:
        any_certificate = ssl.create_default_context()
        any_certificate.check_hostname = False
        any_certificate.verify_mode = ssl.CERT_NONE
        async with (
            engines() as fleet,
            serving(
                fleet.prefill_urls,
                fleet.decode_urls,
                *flags,
                context=any_certificate,
            ) as served,
        ):
            first = files.cert.read_text()
            assert await _holds(served, b"first", first)
            stream = STREAM | {"max_tokens": 50_000}
            running = served.client.send(b"POST", COMPLETIONS, stream, _with(b"first"))
            await running.until_events(1)
            for count, spoil in enumerate(bad, start=1):
                make_certificate(tmp_path)
                files.write("second")
                spoil()
                served.process.send_signal(signal.SIGHUP)
                await told(b"stay as they are", count)
                assert await _holds(served, b"first", first), count
            make_certificate(tmp_path)
            files.write("second")
            served.process.send_signal(signal.SIGHUP)
            await told(b"were read again", 1)
            assert await _holds(served, b"second", files.cert.read_text())
            assert running.status == 200
            assert not running.over
            running.call.abort()
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    errors = [one for one in lines if one.get("level") == "error"]
    # One error each, with the file that is bad.
    assert [one["message"] for one in errors] == (
        ["certificates, keys and tenants stay as they are"] * len(bad)
    )
    for error in errors:
        assert str(tmp_path) in error["reason"]


def _with(key: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + key)]


async def _status(client: "Client", path: str, key: bytes) -> int:
    return (await client.send(b"GET", path, headers=_with(key)).end()).status
