"""Engines in EndpointSlices of Kubernetes (discovery.k8s.io/v1), as its API server tells of them.

A slice has up to some hundred endpoints of one Service, and the labels of that Service. An endpoint
may be in two slices for a moment, and a pod with addresses of two families is in slices of both.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.live.discovery.found import Found, View
from balanceroute.proxy.live.engines.engine_url import EngineUrl, valid_host
from balanceroute.proxy.live.engines.instances import Role, Target

ROLE_LABEL = "balanceroute/role"
"""Of a Service: prefill or decode."""
_PORT_NAMES = ("api", "http", "https")
_FAMILIES = ("IPv4", "IPv6")
_GONE = 410

_log = logging.getLogger(__name__)


class WatchError(BalanceRouteError):
    """The API server answers what cannot be used."""


class ExpiredError(WatchError):
    """It no longer knows the version from which it is to tell changes: everything is listed again."""


class Slices:
    """The slices, as a list and the changes since then give them.

    Args:
        role: What their engines do; None for what their label says.

    Attributes:
        version: Up to which change they are known, in the server's words.
    """

    def __init__(self, role: Role | None) -> None:
        self.version = ""
        self._role = role
        self._by_name: dict[str, Mapping[str, Any]] = {}
        # The engines of those that were looked at, each with what names its pod.
        self._engines_of: dict[str, list[tuple[str, Found]]] = {}
        self._unnamed: set[str] = set()  # Without a role; logged once.

    def replace(self, pages: "list[Mapping[str, Any]]") -> None:
        """Take a list, which may have come in pages.

        Raises:
            WatchError: It is none.
        """
        try:
            by_name = {_name(one): one for page in pages for one in page["items"] or ()}
            version = pages[-1]["metadata"]["resourceVersion"]
        except (KeyError, TypeError) as error:
            raise WatchError(f"no list of EndpointSlices: {error!r}") from None
        self._by_name, self.version = by_name, version
        self._engines_of.clear()

    def apply(self, line: bytes) -> bool:
        """Take a change; return whether the slices are others now.

        Raises:
            ExpiredError: The changes since the version are not known any more.
            WatchError: It is no change of a slice.
        """
        try:
            change = json.loads(line)
            kind, thing = change["type"], change["object"]
            if kind == "ERROR":
                raise _error(thing)
            self.version = thing["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                return False
            name = _name(thing)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WatchError(f"no change of an EndpointSlice: {error!r}") from None
        self._engines_of.pop(name, None)
        if kind == "DELETED":
            self._by_name.pop(name, None)
        else:
            self._by_name[name] = thing
        return True

    def view(self) -> View:
        """Return the engines. What is not as it should be in a slice is left out."""
        found: dict[Target, Found] = {}
        seen: dict[str, str] = {}  # The family in which a pod counts.
        for name, one in sorted(self._by_name.items(), key=lambda item: _family(item[1])):
            if name not in self._engines_of:
                self._engines_of[name] = list(self._engines(one))
            for pod, engine in self._engines_of[name]:
                if seen.setdefault(pod, _family(one)) != _family(one):
                    continue
                before = found.get(engine.target)
                # Of one that is in two slices, the worse news is the later.
                if before is None or engine.leaving:
                    found[engine.target] = engine
        return found

    def _engines(self, one: Mapping[str, Any]) -> Iterator[tuple[str, Found]]:
        """Yield the engines of a slice, each with what names its pod."""
        name, labels = _name(one), one["metadata"].get("labels") or {}
        role = self._role or _role(labels.get(ROLE_LABEL))
        port = _port(one.get("ports") or ())
        if role is None or port is None or _family(one) not in _FAMILIES:
            if name not in self._unnamed:
                self._unnamed.add(name)
                what = f"the label {ROLE_LABEL}" if role is None else "one port, or one named api"
                fields = {"slice": name, "reason": f"it needs {what}"}
                _log.warning("an EndpointSlice is left out", extra={"fields": fields})
            return
        scheme, number = port
        for endpoint in one.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            try:
                host = valid_host(endpoint["addresses"][0])
            except (KeyError, IndexError, TypeError, ConfigError):
                continue
            target = Target(role, EngineUrl(scheme, host, number).base)
            pod = (endpoint.get("targetRef") or {}).get("uid") or host
            # A condition that is not told is true, but for the last.
            yield (
                f"{role.value} {pod}",
                Found(
                    target,
                    ready=conditions.get("ready") is not False,
                    leaving=conditions.get("terminating") is True,
                ),
            )


def _error(status: Mapping[str, Any]) -> WatchError:
    message = str(status.get("message", status))
    kind = ExpiredError if status.get("code") == _GONE else WatchError
    return kind(message)


def _name(one: Mapping[str, Any]) -> str:
    metadata = one["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}"


def _family(one: Mapping[str, Any]) -> str:
    return str(one.get("addressType"))


def _role(word: object) -> Role | None:
    return next((role for role in Role if role.value == word), None)


def _port(ports: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """Return the scheme and number of the port of the API: the one of that name, or the only one."""
    named = [one for one in ports if one.get("name") in _PORT_NAMES] or ports
    if len(named) != 1 or not isinstance(named[0].get("port"), int):
        return None
    is_https = "https" in (named[0].get("name"), named[0].get("appProtocol"))
    return "https" if is_https else "http", named[0]["port"]
