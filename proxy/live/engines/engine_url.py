"""Addresses of engines: `http://host:port`, or `http://host:port@rank` for one of several ranks.

An address carries no credentials and no path. Error messages here read on from the name of the
setting, and never show what stands before an `@`, which may be a password.
"""

import re
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.wire.addresses import bracketed
from balanceroute.topologies import MAX_RANKS

DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"(https?)://", re.IGNORECASE)
# RFC 1123, and underscores, which container networks use.
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_DIGITS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, order=True)
class EngineUrl:
    """The address of an engine, or of one data-parallel rank behind it.

    Attributes:
        scheme: "http" or "https".
        host: A name in lower case, or an IP address, without brackets.
        port: From 1 to 65535.
        rank: The rank to name in the `X-data-parallel-rank` header; None if the address is all.
    """

    scheme: str
    host: str
    port: int
    rank: int | None = None

    @property
    def base(self) -> str:
        """The URL of the server, as in `http://[::1]:8000`."""
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"

    @property
    def name(self) -> str:
        """What to call it in messages and metrics: the URL, with `@rank` if it has one."""
        return self.base if self.rank is None else f"{self.base}@{self.rank}"

    def __str__(self) -> str:
        return self.name

    def at(self, rank: int | None) -> "EngineUrl":
        """Return the address of a rank behind the same server."""
        return replace(self, rank=rank)

    @classmethod
    def parse(cls, text: str) -> "EngineUrl":
        """Read an address.

        Raises:
            ConfigError: It is not one.
        """
        scheme = _SCHEME.match(text)
        if scheme is None:
            raise _error(text, "must begin with http:// or https://")
        authority, cut, rest = _split_path(text[scheme.end() :])
        rank = None
        before, at, last = authority.rpartition("@")
        if at and _DIGITS.fullmatch(last):
            authority, rank = before, int(last)
        if "@" in authority:
            raise _error(text, "must not carry credentials")
        if rank is not None and rank >= MAX_RANKS:
            raise _error(text, f"has a rank beyond {MAX_RANKS - 1}")
        if cut and (cut != "/" or rest or rank is not None):
            raise _error(text, "must end after the port: no path, no query")
        try:
            host, port = _host_and_port(authority)
        except ConfigError as error:
            raise _error(text, str(error)) from None
        name = scheme[1].lower()
        return cls(name, host, DEFAULT_PORTS[name] if port is None else port, rank)


def valid_host(text: str) -> str:
    """Return an IP address (without brackets) or a host name in its usual spelling.

    Raises:
        ConfigError: It is neither.
    """
    if ":" in text:
        try:
            address = IPv6Address(text)
        except ValueError:
            raise ConfigError("has a host that is not an IPv6 address") from None
        if address.scope_id is not None:
            raise ConfigError("has an IPv6 address with a zone, which no Host header can carry")
        return str(address)
    labels = text.lower().removesuffix(".").split(".")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError("has a host that is neither a name nor an IP address")
    # A name that ends in a number is read as an IPv4 address, in odd spellings too (2130706433).
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        try:
            return str(IPv4Address(text))
        except ValueError:
            raise ConfigError("has a host that is not an IPv4 address") from None
    return ".".join(labels)


def _split_path(rest: str) -> tuple[str, str, str]:
    """Cut before the first character that ends an authority (RFC 3986, §3.2)."""
    cut = re.search(r"[/?#\\]", rest)
    if cut is None:
        return rest, "", ""
    return rest[: cut.start()], cut[0], rest[cut.end() :]


def _host_and_port(authority: str) -> tuple[str, int | None]:
    if authority.startswith("["):
        inner, closed, port = authority[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            raise ConfigError("has a broken IPv6 address")
        if ":" not in inner:
            raise ConfigError("has a host in brackets that is not an IPv6 address")
        return valid_host(inner), _port(port[1:]) if port else None
    host, colon, port = authority.partition(":")
    if ":" in port:
        raise ConfigError("has an IPv6 address without brackets, or two ports")
    if not host:
        raise ConfigError("has no host")
    return valid_host(host), _port(port) if colon else None


def _port(text: str) -> int:
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= 65_535:
        raise ConfigError("has a port that is not from 1 to 65535")
    return int(text)


def _error(text: str, reason: str) -> ConfigError:
    return ConfigError(f"is {_shown(text)!r}: it {reason}")


def _shown(text: str) -> str:
    """Return an address without what may be secret in it: credentials, path, query."""
    scheme, slashes, rest = text.partition("://") if "://" in text else ("", "", text)
    before, at, last = rest.rpartition("@")
    authority, cut, _ = _split_path(last)
    return f"{scheme}{slashes}{'***' if before else ''}{at}{authority}{cut and '/…'}"
