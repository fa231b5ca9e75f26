"""Keys, TLS and the checks of callers."""

import hmac
import ipaddress
import os
import re
import ssl
import stat
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from balanceroute.proxy.core.admission import TenantLimits
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.wire.messages import Headers, Rejection, first_value

# Keys and tokens: read from files, and kept out of everything that is shown; and whose they are.
#
# A key never stands on the command line, where every user of the machine can read it.

MAX_FILE_BYTES = 1 << 20
# What an Authorization header can carry as it is.
_KEY = re.compile(rb"[!-~]{1,1024}")


@dataclass(frozen=True, slots=True)
class Secret:
    """A key whose repr does not show it."""

    value: bytes = field(repr=False)

    def matches(self, given: bytes) -> bool:
        """Return whether `given` is the key, in a time that does not depend on how much of it is."""
        return hmac.compare_digest(self.value, given)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant."""

    name: str  # In logs and metrics.
    digests: tuple[Secret, ...] = ()  # SHA-256 of each of its keys.
    weight: float = 1.0  # Its share, see `Ticket.weight`.
    level: int = 0  # What the levels of its requests begin from; lower goes first.
    # When the first token of its requests is due, unless they say; None for never.
    deadline_s: float | None = None
    models: tuple[str, ...] = ()  # Those that it may use; empty for all.
    # The task of its requests to an alias of models, unless they say; empty for none.
    task: str = ""
    client_priority: bool = False  # Whether its requests may choose their level.
    client_deadline: bool = False  # Whether they may choose their deadline.
    default: bool = False  # Whether it has the requests of clients whose key is no tenant's.
    limits: TenantLimits = TenantLimits()  # What it may ask for.


def digest_of(key: bytes) -> Secret:
    """Return what a file has of a key. It reveals nothing of a key that cannot be guessed."""
    return Secret(sha256(key).hexdigest().encode())


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys in use. They are read again while the proxy serves."""

    api_keys: tuple[Secret, ...]  # The keys that clients may present; empty if all may come.
    engine_key: Secret | None  # Sent to the engines as their API key.
    admin_token: Secret | None  # What administrators present; None if they need no token.
    tenants: tuple[Tenant, ...] = ()  # Empty if there are none.
    # Callers of the select service present one of them; empty where that is off.
    select_keys: tuple[Secret, ...] = ()

    @property
    def secrets(self) -> list[Secret]:
        single = (self.engine_key, self.admin_token)
        return [*self.api_keys, *self.select_keys, *(one for one in single if one is not None)]


def bearer_token(headers: Headers) -> bytes:
    """Return the bearer token of the only Authorization header; empty, which is no key, if there is none."""
    given = [value for name, value in headers if name == b"authorization"]
    scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
    return token if scheme.lower() == b"bearer" else b""


def matches_any(secrets: Iterable[Secret], given: bytes) -> bool:
    """Return whether `given` is one of the keys; always compares with each of them."""
    return sum(secret.matches(given) for secret in secrets) > 0


def read_secrets(path: Path) -> tuple[Secret, ...]:
    """Read a file of keys, one a line; empty lines and lines that begin with # do not count.

    Raises:
        ConfigError: The file cannot be read, other users may read or change it, or it holds no key or
            something that is none. The message reads on from the name of the setting.
    """
    content = _read(path)
    secrets: dict[Secret, int] = {}
    for number, line in enumerate(content.removeprefix(BOM_UTF8).splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        try:
            secret = as_secret(key)
        except ConfigError as error:
            raise ConfigError(f"is {path}: line {number}: {error}") from None
        if secret in secrets:
            raise ConfigError(f"is {path}: line {number} repeats line {secrets[secret]}")
        secrets[secret] = number
    if not secrets:
        raise ConfigError(f"is {path}: the file holds no key")
    return tuple(secrets)


def read_secret(path: Path) -> Secret:
    """Read a file that holds one key.

    Raises:
        ConfigError: As for `read_secrets`, or it holds several.
    """
    secret, *more = read_secrets(path)
    if more:
        raise ConfigError(f"is {path}: the file holds several keys, must hold one")
    return secret


def as_secret(key: bytes) -> Secret:
    """Return a key that can be sent in a header. Raises ConfigError."""
    if not _KEY.fullmatch(key):
        raise ConfigError("a key has 1 to 1024 visible ASCII characters")
    return Secret(key)


def refuse_if_shared(path: Path, status: os.stat_result) -> None:
    """Refuse a file of secrets that every user of the machine may read or change. Raises ConfigError."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"is {path}: not a regular file")
    if status.st_mode & stat.S_IRWXO:
        raise ConfigError(
            f"is {path}: open to every user (chmod o= {path}; in Kubernetes "
            "defaultMode: 0440 and an fsGroup)"
        )


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open) as file:
            refuse_if_shared(path, os.fstat(file.fileno()))
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"is {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"is {path}: larger than {MAX_FILE_BYTES} bytes")
    return content


def _open(name: str, flags: int) -> int:
    # Not blocking, so that a pipe without a writer is refused instead of waited for.
    return os.open(name, flags | os.O_NONBLOCK)


# Which requests a web page may have made: what a listener without a token must not obey.
#
# A page of another site may send requests to loopback, and after its own name was made to resolve
# to loopback (DNS rebinding) it may read the answers too. The browser shows it: Host is the page's
# name, and Origin, which browsers send with every POST and with requests to another site, is
# where it came from.

_PORT = re.compile(r":[0-9]*$")
# Brackets stand around an IPv6 address, and nowhere else.
_BRACKETED = re.compile(r"\[([0-9a-f:.]+)\]")


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own, which no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_loopback_in_url(host: str) -> bool:
    bracketed = _BRACKETED.fullmatch(host)
    if bracketed is None:
        return ":" not in host and is_loopback(host)
    return ":" in host and is_loopback(bracketed[1])


def check_host(headers: Headers, names: Collection[str]) -> Rejection | None:
    """Return why a request may be a foreign web page's, or None.

    Args:
        headers: The request's. Without Host it is HTTP/1.0, which no browser speaks.
        names: Accepted in Host, in lower case, beside loopback.
    """
    authority = first_value(headers, b"host")
    if authority is None:
        return None
    host = _PORT.sub("", authority.decode("latin-1").lower())
    if host not in names and not _is_loopback_in_url(host):
        return Rejection(
            403, f"without a token this listener is not called {host[:256]!r}: see --admin-name"
        )
    origins = [value for name, value in headers if name == b"origin"]
    if any(origin.partition(b"://")[2].lower() != authority.lower() for origin in origins):
        return Rejection(
            403, "without a token this listener takes no orders of another site's page"
        )
    return None


# TLS contexts: HTTP/1.1 over TLS 1.2 or newer, and engines' certificates verified by default.


class ServerTls:
    """The TLS context for clients, with the newest certificate.

    Each certificate has a context of its own, which a handshake takes: one that cannot be loaded leaves a
    part of itself in a context, and no handshake succeeds there any more.

    Raises:
        ConfigError: See `server_context`.
    """

    def __init__(self, cert: Path, key: Path, *, http2: bool = False) -> None:
        self.context = self._newest = server_context(cert, key, http2=http2)
        # Called in every handshake, also where the client names no server.
        self.context.sni_callback = self._choose

    def use(self, newest: ssl.SSLContext) -> None:
        """Serve with this context's certificate from the next handshake on."""
        self._newest = newest

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        handshake.context = self._newest


def server_context(cert: Path, key: Path, *, http2: bool = False) -> ssl.SSLContext:
    """Return a context with a certificate to serve clients with.

    Args:
        cert: The certificate chain, PEM.
        key: Its private key, PEM, not encrypted.
        http2: Whether HTTP/2 is spoken too.

    Raises:
        ConfigError: They cannot be read, other users may read the key, or they do not belong together.
            The message reads on from the name of the setting.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"] if http2 else ["http/1.1"])
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
