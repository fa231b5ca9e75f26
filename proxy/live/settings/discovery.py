"""Where engines that come and go are found."""

import re
from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.settings.checks import base_address
from balanceroute.proxy.live.settings.setting import file, integer, seconds, text, texts

_SOURCE = re.compile(r"(?:(prefill|decode)=)?(file|dns|kubernetes):(.+)", re.DOTALL)
# A selector of labels, and a namespace behind an @, which no selector has.
_SELECTOR = re.compile(r"[A-Za-z0-9_.,/=! ()-]{1,1024}(?:@[a-z0-9-]{1,63})?")


@dataclass(frozen=True, slots=True)
class EngineSource:
    """One place where engines are found.

    Attributes:
        kind: "file", "dns" or "kubernetes".
        place: A path, `HOST:PORT`, or `SELECTOR[@NAMESPACE]`.
        role: What the engines do; None if the source tells it.
    """

    kind: str
    place: str
    role: Role | None = None


def engine_source(word: str) -> EngineSource:
    """Read `file:PATH`, `ROLE=dns:HOST:PORT` or `[ROLE=]kubernetes:SELECTOR[@NAMESPACE]`.

    Raises:
        ConfigError: It is none of them.
    """
    match = _SOURCE.fullmatch(word)
    if match is None:
        raise ConfigError(
            f"is {shown(word)}, must be file:PATH, ROLE=dns:HOST:PORT or "
            "[ROLE=]kubernetes:SELECTOR[@NAMESPACE], with prefill or decode for ROLE"
        )
    role = None if match[1] is None else Role(match[1])
    kind, place = match[2], match[3]
    if kind == "file" and role is not None:
        raise ConfigError(f"is {shown(word)}: the file itself names the role of each engine")
    if kind == "dns":
        if role is None:
            raise ConfigError(f"is {shown(word)}: needs the role, as in decode=dns:HOST:PORT")
        EngineUrl.parse(f"http://{place}")
    if kind == "kubernetes" and not _SELECTOR.fullmatch(place):
        raise ConfigError(f"is {shown(word)}: no selector of labels")
    return EngineSource(kind, place, role)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """Engines that come and go while the proxy serves."""

    discover: tuple[EngineSource, ...] = texts(
        "where engines that come and go are found: file:PATH, a TOML file with [[prefill]] and "
        "[[decode]] tables; ROLE=dns:HOST:PORT, the addresses of a name; "
        "[ROLE=]kubernetes:SELECTOR[@NAMESPACE], the EndpointSlices with these labels",
        engine_source,
        metavar="SOURCE",
        at_top=False,
    )
    discover_interval_s: float = seconds(2.0, "between two readings of a file or a name")
    discover_hold_s: float = seconds(
        5.0, "that an engine may be missing where it was found before it is drained", 0
    )
    discover_limit: int = integer(
        4096, "engines that are found and count; of more, some are left out", 1, 100_000
    )
    kubernetes_api: str = text(
        "",
        "the Kubernetes API server (default: the one of the cluster that this pod is in)",
        base_address,
        metavar="URL",
    )
    kubernetes_account: Path | None = file(
        "the folder with token, ca.crt and namespace of the service account "
        "(default: /var/run/secrets/kubernetes.io/serviceaccount)",
        metavar="FOLDER",
    )
    roster_state: Path | None = file(
        "keeps the engines and the policy over a restart, as they were ordered and found"
    )

    def covers(self, role: Role) -> bool:
        """Return whether engines of a role may be found."""
        return any(one.role in (role, None) for one in self.discover)
