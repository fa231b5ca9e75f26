"""The file of tenants: TOML, one `[[tenant]]` each."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.core.admission import Rate, TenantLimits
from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.setting import file, integer, number, switch, text, texts
from balanceroute.proxy.live.security import Secret, Tenant, digest_of, read_secrets
from balanceroute.proxy.live.settings.checks import model_name
from balanceroute.proxy.live.telemetry.registry import OTHER
from balanceroute.proxy.settings import Given
from balanceroute.topologies import did_you_mean

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MOST = 10**9
_DAY_S = 86_400


def _name(word: str) -> str:
    if not _NAME.fullmatch(word) or word == OTHER:
        raise ConfigError(f"is {shown(word)}, must be 1 to 64 of A-Z a-z 0-9 . _ -, not {OTHER!r}")
    return word


def _digest(word: str) -> Secret:
    if not _DIGEST.fullmatch(word):
        # What stands there may be a key.
        raise ConfigError("has what is no SHA-256: 64 hexadecimal digits (balanceroute hash-key)")
    return Secret(word.lower().encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTable:
    """The members of a `[[tenant]]`."""

    name: str = text("", "what it is called in logs and metrics", _name, metavar="NAME")
    key_sha256: tuple[Secret, ...] = texts(
        "SHA-256 of each of its keys, as `balanceroute hash-key` prints it",
        _digest,
        metavar="HEX",
        at_top=False,
    )
    key_file: Path | None = file("holds its keys, one a line")
    weight: float = number(1.0, "its share under --fair-queue", 1e-3, 1e6)
    level: int = integer(
        0, "what the levels of its requests begin from; lower goes first", -1000, 1000
    )
    requests_per_minute: int | None = integer(None, "its rate of requests", 1, _MOST, word="none")
    request_burst: int | None = integer(
        None, "requests at once", 1, _MOST, word="auto", shown_default="those of a minute"
    )
    tokens_per_minute: int | None = integer(
        None, "its rate of tokens, of prompts and answers", 1, _MOST, word="none"
    )
    token_burst: int | None = integer(
        None, "tokens at once", 1, _MOST, word="auto", shown_default="those of a minute"
    )
    concurrency: int | None = integer(None, "requests in flight", 1, _MOST, word="none")
    queue_limit: int | None = integer(
        None, "of these, requests that wait for an engine", 1, _MOST, word="none"
    )
    deadline_s: float | None = number(
        None, "time to the first token, unless a request says", 0.001, _DAY_S, word="none"
    )
    models: tuple[str, ...] = texts(
        "those that it may use", model_name, metavar="NAME", shown_default="all", at_top=False
    )
    task: str = text(
        "", "the task of its requests to an alias of models, unless they say", metavar="TASK"
    )
    client_priority: bool = switch(False, "as --client-priority, for its requests")
    client_deadline: bool = switch(False, "as --client-deadline, for its requests")
    default: bool = switch(
        False, "it has the requests with a key of --api-key-file, or without that those without key"
    )


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """Read a file of tenants.

    Raises:
        ConfigError: It cannot be read or used. The message names the file, the table and the key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    for key in content:
        if key != "tenant":
            raise ConfigError(f"{path}: {key}: unknown key{did_you_mean(key, ('tenant',))}")
    tables = content.get("tenant")
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ConfigError(f"{path}: needs tenants: write [[tenant]] before each")
    tenants = tuple(_read(path, place, table) for place, table in enumerate(tables))
    for reason in _contradictions(tenants):
        raise ConfigError(f"{path}: {reason}")
    return tenants


def _read(path: Path, place: int, table: dict[str, object]) -> Tenant:
    where = f"tenant[{place}]"
    given = Given((TenantTable,), flags={}, table=table, table_name=where, file=path)
    read = given.read(TenantTable)
    if not read.name:
        raise ConfigError(f"{path}: [{where}].name: is missing")
    digests = read.key_sha256
    if read.key_file is not None:
        with given.blamed("key_file"):
            digests += tuple(digest_of(one.value) for one in read_secrets(read.key_file))
    if not (digests or read.default):
        reason = "has no key_sha256 and no key_file, and is not the default"
        raise ConfigError(f"{path}: [{where}] {reason}: nobody could be it")
    for rate, burst in (
        ("requests_per_minute", "request_burst"),
        ("tokens_per_minute", "token_burst"),
    ):
        if getattr(read, rate) is None and getattr(read, burst) is not None:
            raise ConfigError(f"{given.where(burst)}: means nothing without {rate}")
    return Tenant(
        read.name,
        digests,
        weight=read.weight,
        level=read.level,
        deadline_s=read.deadline_s,
        models=read.models,
        task=read.task,
        client_priority=read.client_priority,
        client_deadline=read.client_deadline,
        default=read.default,
        limits=TenantLimits(
            requests=_rate(read.requests_per_minute, read.request_burst),
            tokens=_rate(read.tokens_per_minute, read.token_burst),
            concurrency=read.concurrency,
            queue_limit=read.queue_limit,
        ),
    )


def _rate(per_minute: int | None, burst: int | None) -> Rate | None:
    return None if per_minute is None else Rate(per_minute, burst or per_minute)


def _contradictions(tenants: tuple[Tenant, ...]) -> Iterator[str]:
    """Yield the errors of the tenants together: names and keys that two have, for example."""
    if not tenants:
        yield "needs tenants: write [[tenant]] before each"
    for name, count in Counter(one.name for one in tenants).items():
        if count > 1:
            yield f"two tenants have the name {name!r}"
    owners: dict[Secret, int] = {}
    for place, tenant in enumerate(tenants):
        for digest in tenant.digests:
            if digest in owners:
                yield f"[tenant[{place}]] has a key that [tenant[{owners[digest]}]] has"
            owners[digest] = place
    defaults = [f"[tenant[{place}]]" for place, one in enumerate(tenants) if one.default]
    if len(defaults) > 1:
        yield f"{' and '.join(defaults)} are both the default"
