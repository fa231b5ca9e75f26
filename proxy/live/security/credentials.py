"""Keys and tokens: read from files, and kept out of everything that is shown; and whose they are.

A key never stands on the command line, where every user of the machine can read it.
"""

import hmac
import os
import re
import stat
from codecs import BOM_UTF8
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from balanceroute.proxy.core.admission import TenantLimits
from balanceroute.proxy.core.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
# What an Authorization header can carry as it is.
_KEY = re.compile(rb"[!-~]{1,1024}")


@dataclass(frozen=True, slots=True)
class Secret:
    """A key whose repr does not show it."""

    value: bytes = field(repr=False)

    def matches(self, given: bytes) -> bool:
        """Return whether `given` is the key, in a time that does not tell how much of it is."""
        return hmac.compare_digest(self.value, given)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant.

    Attributes:
        name: In logs and metrics.
        digests: SHA-256 of each of its keys.
        weight: Its share, see `Ticket.weight`.
        level: What the levels of its requests begin from; lower goes first.
        deadline_s: When the first token of its requests is due, unless they say; None for never.
        models: Those that it may use; empty for all.
        task: The task of its requests to an alias of models, unless they say; empty for none.
        client_priority: Whether its requests may choose their level.
        client_deadline: Whether they may choose their deadline.
        default: Whether it has the requests of clients whose key is no tenant's.
        limits: What it may ask for.
    """

    name: str
    digests: tuple[Secret, ...] = ()
    weight: float = 1.0
    level: int = 0
    deadline_s: float | None = None
    models: tuple[str, ...] = ()
    task: str = ""
    client_priority: bool = False
    client_deadline: bool = False
    default: bool = False
    limits: TenantLimits = TenantLimits()


def digest_of(key: bytes) -> Secret:
    """Return what a file has of a key. It tells nothing of a key that nobody can guess."""
    return Secret(sha256(key).hexdigest().encode())


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys in use. They are read again while the proxy serves.

    Attributes:
        api_keys: The keys that clients may present; empty if all may come.
        engine_key: Sent to the engines as their API key.
        admin_token: What administrators present; None if they need no token.
        tenants: Empty if there are none.
    """

    api_keys: tuple[Secret, ...]
    engine_key: Secret | None
    admin_token: Secret | None
    tenants: tuple[Tenant, ...] = ()

    @property
    def secrets(self) -> list[Secret]:
        """All keys."""
        others = (self.engine_key, self.admin_token)
        return [*self.api_keys, *(one for one in others if one is not None)]


def matches_any(secrets: Iterable[Secret], given: bytes) -> bool:
    """Return whether `given` is one of the keys; always compares with each of them."""
    return sum(secret.matches(given) for secret in secrets) > 0


def read_secrets(path: Path) -> tuple[Secret, ...]:
    """Read a file of keys, one a line; empty lines and lines that begin with # do not count.

    Raises:
        ConfigError: The file cannot be read, others may read or change it, or it holds no key or
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
    secret, *others = read_secrets(path)
    if others:
        raise ConfigError(f"is {path}: the file holds several keys, must hold one")
    return secret


def as_secret(key: bytes) -> Secret:
    """Return a key that can be sent in a header.

    Raises:
        ConfigError: It cannot.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError("a key has 1 to 1024 visible ASCII characters")
    return Secret(key)


def refuse_if_shared(path: Path, status: os.stat_result) -> None:
    """Refuse a file of secrets that every user of the machine may read or change.

    Raises:
        ConfigError: They may.
    """
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
