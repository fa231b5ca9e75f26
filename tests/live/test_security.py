"""Keys: read from files that nobody else can open, and shown nowhere."""

import os
import ssl
from pathlib import Path

import pytest
from tests.support.certificate import CERT, KEY, make_certificate

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security import (
    MAX_FILE_BYTES,
    Secret,
    ServerTls,
    as_secret,
    engine_context,
    matches_any,
    read_secret,
    read_secrets,
    server_context,
)
from balanceroute.proxy.live.settings.configure import make_config


def write(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_file_holds_a_key_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, b"# clients\nsk-one\n\n  sk-two  \r\nsk-three")
    assert read_secrets(path) == (Secret(b"sk-one"), Secret(b"sk-two"), Secret(b"sk-three"))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_secrets(write(tmp_path, b"\xef\xbb\xbfsk-one\nsk-two\n")) == (
        Secret(b"sk-one"),
        Secret(b"sk-two"),
    )


def test_a_group_may_read_a_file_of_keys(tmp_path: Path) -> None:
    assert read_secret(write(tmp_path, b"sk-one\n", 0o640)) == Secret(b"sk-one")


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601])
def test_a_file_of_keys_open_to_all_is_refused(mode: int, tmp_path: Path) -> None:
    path = write(tmp_path, b"sk-one\n", mode)
    with pytest.raises(ConfigError, match=rf"is {path}: open to every user \(chmod o= {path};"):
        read_secrets(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file holds no key"),
        (b"# nothing\n \n", "the file holds no key"),
        (b"sk-one\nhunter2 x\n", "line 2: a key has 1 to 1024 visible ASCII characters"),
        (b"hunter2\x00\n", "line 1: a key has"),
        (b"hunter2\xff\n", "line 1: a key has"),
        (b"hunter2" * 200, "line 1: a key has"),
        (b"hunter2\nsk\nhunter2\n", "line 3 repeats line 1"),
        (b"#" * (MAX_FILE_BYTES + 1), f"larger than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_file_without_good_keys_is_refused_without_showing_them(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as refused:
        read_secrets(path)
    assert str(refused.value).startswith(f"is {path}: {reason}")
    assert "hunter2" not in str(refused.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: No such file"):
        read_secrets(tmp_path / "absent")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_secrets(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="pipe: not a regular file"):
        read_secrets(tmp_path / "pipe")


def test_a_single_key_is_not_one_of_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds several keys, must hold one"):
        read_secret(write(tmp_path, b"a\nb\n"))


def test_a_key_is_not_in_its_repr() -> None:
    assert "hunter2" not in repr(Secret(b"hunter2"))
    assert "hunter2" not in f"{Secret(b'hunter2')}"
    assert "hunter2" not in repr([Secret(b"hunter2")])


def test_a_key_matches_itself_alone() -> None:
    secret = as_secret(b"sk-one")
    assert secret.matches(b"sk-one")
    for other in (b"", b"sk-on", b"sk-one ", b"SK-ONE", b"sk-one\xff"):
        assert not secret.matches(other)


def test_one_of_several_keys_is_enough() -> None:
    secrets = [Secret(b"a"), Secret(b"b")]
    assert matches_any(secrets, b"a")
    assert matches_any(secrets, b"b")
    assert not matches_any(secrets, b"c")
    assert not matches_any([], b"")


# TLS contexts: a certificate with its own key, TLS 1.2 or newer, and engines verified.


OTHER_KEY = """-----BEGIN EC PRIVATE KEY-----
MHcCAQEEII9CVx6NsmGVrya/drReNN+E4bIrTt//RCk0lDeKv5xioAoGCCqGSM49
AwEHoUQDQgAETNAHpUXAsrRKOW5zmGVEIMVXTySjIO8bqtP9xcEHNJi7JQQOtv4L
F8lm955I3l665C/BDvjiqgGrYQL79NMOIw==
-----END EC PRIVATE KEY-----
"""
ENCRYPTED_KEY = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAh+iB0cyU2vGwICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEOB7Xizc5FwT+zWTt2qRyVAEgZBH
ULHXEsplicB1gBXE75gxoWWMDpAZUcdlC3A3/xbs7mCWO/k80x4WUSO5yNkyvclz
PSia6umG4uberay/J/D3GMuWuSwgEk/N/hpVwvgZoGKcUx4MQqHJ8OK7Sim8RJgf
NaNi1HYDz9txIbha6qBp3MivR4rJKEebrrbcBlScxI8u2vsjSVg+NfAN3cMAHtY=
-----END ENCRYPTED PRIVATE KEY-----
"""


@pytest.fixture
def cert(tmp_path: Path) -> Path:
    path = tmp_path / "cert.pem"
    path.write_text(CERT)
    return path


def key_file(folder: Path, text: str = KEY, mode: int = 0o600) -> Path:
    path = folder / "key.pem"
    path.write_text(text)
    path.chmod(mode)
    return path


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, hostname: str) -> str | None:
    """Shake hands in memory; return the TLS version."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=hostname),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    open_ends = list(ends)
    while open_ends:
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    return ends[0].version()


def test_a_verified_engine_is_talked_to(cert: Path, tmp_path: Path) -> None:
    server = server_context(cert, key_file(tmp_path))
    assert handshake(engine_context(cert, insecure=False), server, "localhost") == "TLSv1.3"


def test_an_engine_is_verified_by_default(cert: Path, tmp_path: Path) -> None:
    server = server_context(cert, key_file(tmp_path))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(engine_context(None, insecure=False), server, "localhost")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(engine_context(cert, insecure=False), server, "elsewhere")
    assert handshake(engine_context(None, insecure=True), server, "elsewhere") == "TLSv1.3"


def test_nothing_older_than_tls_1_2_is_spoken(cert: Path, tmp_path: Path) -> None:
    for context in (
        server_context(cert, key_file(tmp_path)),
        engine_context(None, insecure=False),
        engine_context(None, insecure=True),
    ):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (KEY, 0o644, "open to every user"),
        (OTHER_KEY, 0o600, "KEY_VALUES_MISMATCH"),
        (ENCRYPTED_KEY, 0o600, "an encrypted key"),
        ("hello", 0o600, "PEM"),
    ],
)
def test_a_key_that_cannot_serve_is_refused(
    text: str, mode: int, reason: str, cert: Path, tmp_path: Path
) -> None:
    key = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=reason) as refused:
        server_context(cert, key)
    assert str(key) in str(refused.value)


def test_a_certificate_that_changes_while_it_is_read_changes_nothing(
    cert: Path, tmp_path: Path
) -> None:
    """Half of it stayed in the context, and no handshake succeeded any more."""
    (tmp_path / "other").mkdir()
    clients = [engine_context(cert, insecure=False)]
    tls = ServerTls(cert, key_file(tmp_path))
    other_cert, other_key = make_certificate(tmp_path / "other")
    clients.append(engine_context(other_cert, insecure=False))
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        tls.use(server_context(other_cert, tmp_path / "key.pem"))
    assert handshake(clients[0], tls.context, "localhost") == "TLSv1.3"
    tls.use(server_context(other_cert, other_key))
    assert handshake(clients[1], tls.context, "localhost") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(clients[0], tls.context, "localhost")


def test_files_that_are_not_there_are_named(cert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is absent: No such file"):
        server_context(Path("absent"), key_file(tmp_path))
    with pytest.raises(ConfigError, match="is absent: No such file"):
        server_context(cert, Path("absent"))
    with pytest.raises(ConfigError, match="is absent: No such file"):
        engine_context(Path("absent"), insecure=False)
    with pytest.raises(ConfigError, match=r"key\.pem: "):
        engine_context(key_file(tmp_path), insecure=False)


def test_a_configuration_names_the_pair_that_clients_meet(cert: Path, tmp_path: Path) -> None:
    flags: dict[str, object] = {"prefill": ["http://p"], "decode": ["http://d"]}
    flags |= {"tls_cert": str(cert), "tls_key": str(key_file(tmp_path))}
    listening = make_config(None, flags | {"engine_ca_file": str(cert)}).listening
    assert (listening.tls_cert, listening.tls_key) == (cert, tmp_path / "key.pem")
    key_file(tmp_path, OTHER_KEY)
    with pytest.raises(ConfigError, match=rf"^--tls-cert is {cert} with key .*KEY_VALUES_MISMATCH"):
        make_config(None, flags)
