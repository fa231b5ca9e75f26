"""TLS contexts: a certificate with its own key, TLS 1.2 or newer, and engines verified."""

import ssl
from pathlib import Path

import pytest
from tests.support.certificate import CERT, KEY, make_certificate

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security import ServerTls, engine_context, server_context
from balanceroute.proxy.live.settings.configure import make_config

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
