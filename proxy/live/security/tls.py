"""TLS contexts: HTTP/1.1 over TLS 1.2 or newer, and engines' certificates verified by default."""

import ssl
from pathlib import Path

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security.credentials import refuse_if_shared


class ServerTls:
    """What clients are served https with, by the newest certificate.

    Each certificate has a context of its own, which a handshake takes: one that cannot be loaded leaves a
    part of itself in a context, and no handshake succeeds there any more.

    Args:
        cert: The certificate chain, PEM.
        key: Its private key, PEM, not encrypted.

    Attributes:
        context: For the listeners.

    Raises:
        ConfigError: See `server_context`.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self.context = self._newest = server_context(cert, key)
        # Called in every handshake, also where the client names no server.
        self.context.sni_callback = self._choose

    def use(self, newest: ssl.SSLContext) -> None:
        """Serve with this context's certificate from the next handshake on."""
        self._newest = newest

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        handshake.context = self._newest


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Return a context with a certificate to serve clients with.

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
    return context


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
