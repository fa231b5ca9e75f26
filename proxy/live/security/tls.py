"""TLS contexts: HTTP/1.1 over TLS 1.2 or newer, and engines' certificates verified by default."""

import ssl
from pathlib import Path

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security.credentials import refuse_if_shared


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Return the context to serve clients with.

    Args:
        cert: The certificate chain, PEM.
        key: Its private key, PEM, not encrypted.

    Raises:
        ConfigError: They cannot be read, others may read the key, or they do not belong together.
            The message reads on from the name of the setting.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Serve with this certificate from the next handshake on; see `server_context`.

    After an error the context may hold half of it: try it on another context first.
    """
    for path in (cert, key):
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"is {path}: {error.strerror}") from None
        if path is key:
            refuse_if_shared(path, status)

    def no_password() -> bytes:
        # Without this, an encrypted key makes OpenSSL ask on the terminal.
        raise ConfigError(f"is {key}: an encrypted key")

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except OSError as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"is {cert} with key {key}: {reason or error}") from None


def engine_context(ca_file: Path | None, *, insecure: bool) -> ssl.SSLContext:
    """Return the context to talk to https engines with.

    Raises:
        ConfigError: The file holds no certificates. The message reads on from the setting's name.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"is {ca_file}: {reason or error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
