"""Engines in EndpointSlices: listed, then watched, at the API server of Kubernetes.

A watch ends after some minutes, and goes on from the last version that the server sent. When it no longer
knows that version (410 Gone), the proxy lists everything again. The last view holds meanwhile.
"""

import asyncio
import json
import logging
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from balanceroute import __version__
from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.live.discovery.reconciler import Found, View
from balanceroute.proxy.live.engines.engine_url import EngineUrl, valid_host
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

# Engines in EndpointSlices of Kubernetes (discovery.k8s.io/v1), as its API server sends them.
#
# A slice has up to some hundred endpoints of one Service, and the labels of that Service. An
# endpoint may be in two slices for a moment, and a pod with addresses of two families is in
# slices of both.

ROLE_LABEL = "balanceroute/role"
"""Of a Service: prefill or decode."""
_PORT_NAMES = ("api", "http", "https")
_FAMILIES = ("IPv4", "IPv6")
_GONE = 410

_log = logging.getLogger(__name__)


class WatchError(BalanceRouteError):
    """The API server answers what cannot be used."""


class ExpiredError(WatchError):
    """The server no longer knows the version that a watch begins at: everything is listed again."""


class Slices:
    """The slices, as a list and the changes since then give them.

    Args:
        role: What their engines do; None for what their label says.
    """

    def __init__(self, role: Role | None) -> None:
        self.version = ""  # Up to which change they are known, in the server's words.
        self._role = role
        self._found: dict[Target, Found] = {}
        # What slices say of pods; of that what counts; and the pods that have an address.
        self._by_slice: dict[str, list[tuple[str, Found]]] = {}
        self._by_pod: defaultdict[str, dict[tuple[str, Target], Found]] = defaultdict(dict)
        self._counted: dict[str, dict[Target, Found]] = {}
        self._pods_at: defaultdict[Target, dict[str, Found]] = defaultdict(dict)
        self._unnamed: set[str] = set()  # Without a role; logged once.

    def replace(self, pages: "list[Mapping[str, Any]]") -> None:
        """Take a list, which may have come in pages. Raises WatchError."""
        try:
            by_name = {_name(one): one for page in pages for one in page["items"] or ()}
            self.version = pages[-1]["metadata"]["resourceVersion"]
        except (KeyError, TypeError) as error:
            raise WatchError(f"no list of EndpointSlices: {error!r}") from None
        self._unnamed &= by_name.keys()
        for name in [name for name in self._by_slice if name not in by_name]:
            self._put(name, [])
        for name, one in by_name.items():
            self._put(name, self._engines(one))

    def apply(self, line: bytes) -> bool:
        """Take a change; return whether it was one of a slice.

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
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WatchError(f"no change of an EndpointSlice: {error!r}") from None
        if kind == "DELETED":
            self._unnamed.discard(name)
            self._put(name, [])
        else:
            self._put(name, self._engines(thing))
        return True

    def view(self) -> View:
        """Return the engines, without the malformed entries of slices."""
        return self._found.copy()

    def _put(self, name: str, engines: list[tuple[str, Found]]) -> None:
        """Take what a slice says now, and look at the pods that it names or named."""
        before = self._by_slice.pop(name, [])
        if engines:
            self._by_slice[name] = engines
        for pod, one in before:
            self._by_pod[pod].pop((name, one.target), None)
        for pod, one in sorted(engines, key=lambda pair: _news(pair[1])):
            self._by_pod[pod][name, one.target] = one
        for pod in dict.fromkeys(pod for pod, _ in (*before, *engines)):
            said = sorted(self._by_pod[pod].values(), key=_news)
            # With addresses of both families it counts once.
            counted = [one for one in said if "[" not in one.target.url] or said
            self._count(pod, {one.target: one for one in counted})

    def _count(self, pod: str, engines: dict[Target, Found]) -> None:
        for target in self._counted.pop(pod, {}) | engines:
            pods = self._pods_at[target]
            pods.pop(pod, None)
            if target in engines:
                pods[pod] = engines[target]
            if pods:  # A pod may end while the next one has its address.
                self._found[target] = max(pods.values(), key=_news)
            else:
                del self._pods_at[target], self._found[target]
        if engines:
            self._counted[pod] = engines
        else:
            del self._by_pod[pod]

    def _engines(self, one: Mapping[str, Any]) -> list[tuple[str, Found]]:
        """Return the engines of a slice, each with what names its pod."""
        name, reason = _name(one), "it is malformed"
        try:
            role = self._role or _role((one["metadata"].get("labels") or {}).get(ROLE_LABEL))
            port = _port(one.get("ports") or ())
            if role is not None and port is not None and one.get("addressType") in _FAMILIES:
                return list(_engines(one, role, *port))
            reason = (
                f"it needs the label {ROLE_LABEL}"
                if role is None
                else "it needs one port, or one named api"
            )
        except (AttributeError, KeyError, TypeError):
            pass
        if name not in self._unnamed:
            self._unnamed.add(name)
            fields = {"slice": name, "reason": reason}
            _log.warning("an EndpointSlice is left out", extra={"fields": fields})
        return []


def _engines(
    one: Mapping[str, Any], role: Role, scheme: str, number: int
) -> Iterator[tuple[str, Found]]:
    for endpoint in one.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        try:
            host = valid_host(endpoint["addresses"][0])
        except (KeyError, IndexError, TypeError, ConfigError):
            continue
        target = Target(role, EngineUrl(scheme, host, number).base)
        pod = (endpoint.get("targetRef") or {}).get("uid") or host
        # A missing condition is true, but for the last.
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


def _news(one: Found) -> tuple[bool, bool]:
    """Order what is said of one address: of two slices or pods the later counts."""
    return one.leaving, one.ready


def _name(one: Mapping[str, Any]) -> str:
    metadata = one["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}"


def _role(word: object) -> Role | None:
    return next((role for role in Role if role.value == word), None)


def _port(ports: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """Return the scheme and number of the port of the API: the one of that name, or the only one."""
    named = [one for one in ports if one.get("name") in _PORT_NAMES] or ports
    number = named[0].get("port") if len(named) == 1 else None
    if not (isinstance(number, int) and 0 < number < 65_536):
        return None
    is_https = "https" in (named[0].get("name"), named[0].get("appProtocol"))
    return "https" if is_https else "http", number


# A long answer, line by line.

_LINE_BYTES = 8 << 20


class LineStream:
    """Receives one response; see `ResponseHandler`. An error answer is one line."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the head came.
        self.answered = asyncio.Event()  # Set when it came, or the answer broke off.
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._error: WireError | None = None
        self._ended = False
        self._more = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Lines that have come and were not returned yet."""
        return len(self._lines)

    async def next(self) -> bytes | None:
        """Return the next line, when it came; None at the end.

        Raises:
            WireError: The answer broke off, or has a line that is too long.
        """
        while not self._lines:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._more.clear()
            await self._more.wait()
        return self._lines.popleft()

    def on_head(self, status: int, headers: Headers) -> None:
        del headers
        self.status = status
        self.answered.set()

    def on_data(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(line for line in lines if line.strip())
        if len(self._rest) > _LINE_BYTES:
            self._rest = b""
            error = WireError(WireFault.TOO_LARGE, "a line is too long", sent=True, answered=True)
            self.on_error(error)
        self._more.set()

    def on_end(self) -> None:
        """End; what has no end of line is a line too."""
        if self._rest.strip():
            self._lines.append(self._rest)
        self._ended = True
        self._more.set()

    def on_error(self, error: WireError) -> None:
        self._error = self._error or error
        self.answered.set()
        self._more.set()


# Requests to the API server, in the name of the account of this pod.

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ApiClient:
    """Asks the API server.

    What the account's folder has is read each time: tokens and certificates are replaced before they
    expire. A local proxy of kubectl needs none.

    Args:
        connect: Makes the connections to the server. Raises ConfigError.
        account: The folder of the service account.
    """

    def __init__(self, connect: "Callable[[], Endpoint]", account: Path) -> None:
        self._connect, self._account = connect, account
        self._endpoint: Endpoint | None = None
        self._authority = b""  # The certificates that it trusts.

    @property
    def namespace(self) -> str:
        """The account's. Raises OSError or UnicodeDecodeError."""
        return self._read("namespace")

    def request(
        self, method: bytes, target: str, body: bytes = b""
    ) -> "tuple[Endpoint, bytes, bytes, Headers, bytes]":
        """Return the server to ask, and the request; all arguments but the handler of the answer.

        Raises:
            OSError: The account's folder cannot be read; UnicodeDecodeError likewise.
            ConfigError: Its certificates cannot be used.
        """
        try:
            authority = (self._account / "ca.crt").read_bytes()
        except FileNotFoundError:
            authority = b""
        if self._endpoint is None or authority != self._authority:
            endpoint = self._connect()
            self.close()
            self._endpoint, self._authority = endpoint, authority
        headers = [
            (b"user-agent", f"balanceroute/{__version__}".encode()),
            (b"accept", b"application/json"),
            (b"accept-encoding", b"identity"),
        ]
        if body:
            headers.append((b"content-type", b"application/json"))
        if self._endpoint.name.startswith("https://"):
            headers.append((b"authorization", f"Bearer {self._read('token')}".encode()))
        return self._endpoint, method, target.encode(), headers, body

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def _read(self, name: str) -> str:
        return (self._account / name).read_text(encoding="utf-8").strip()


def why_refused(status: int, body: bytes) -> str:
    """Return what an answer of the API server says that is no success."""
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = ""
    return f"status {status}{message and ': '}{message}"


_PAGE_ITEMS = 500
_PAGE_BYTES = 32 << 20
_LIST_S = 30.0
_MOST_PAGES = 1_000
_WATCH_S = (240, 300)
# A server sends a bookmark about once a minute. After longer silence it is asked again, and answers in time.
_SILENCE_S, _ANSWER_S = 90.0, 15.0
_SHORT_S = 1.0
_BACKOFF_S = (0.5, 10.0)


class KubernetesSlices:
    """The EndpointSlices that a selector names.

    Args:
        selector: Of labels.
        role: What the engines do; None for what the slices' label says.
        api: Asks the API server.
        rng: Spreads the watches and the tries after an error.
    """

    def __init__(
        self,
        selector: str,
        namespace: str | None,
        role: "Role | None",
        *,
        api: ApiClient,
        rng: random.Random,
    ) -> None:
        self._selector, self._namespace = selector, namespace
        self._slices = Slices(role)
        self._api, self._rng = api, rng
        self._backoff_s = _BACKOFF_S[0]

    async def run(self, report: "Callable[[View], None]") -> None:
        """List, then watch, and report all engines after each change."""
        try:
            while True:
                try:
                    if not self._slices.version:
                        await self._list()
                        report(self._slices.view())
                    if not await self._watch(report):
                        await self._wait()  # A server that ends each watch at once.
                except ExpiredError as error:
                    _log.debug("listed again", extra={"fields": {"reason": str(error)}})
                    self._slices.version = ""
                    await self._wait()
                except (BalanceRouteError, OSError, UnicodeDecodeError) as error:
                    fields = {"selector": self._selector, "reason": str(error)}
                    _log.warning("EndpointSlices cannot be watched", extra={"fields": fields})
                    if isinstance(error, WatchError):
                        self._slices.version = ""
                    await self._wait()
        finally:
            self._api.close()

    async def _wait(self) -> None:
        await asyncio.sleep(self._backoff_s * self._rng.uniform(0.5, 1.0))
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])

    async def _list(self) -> None:
        pages: list[Mapping[str, Any]] = []
        following: object = None
        while following or not pages:
            if len(pages) == _MOST_PAGES:
                raise WatchError(f"a list of more than {_MOST_PAGES} pages")
            more = {"continue": following} if following else {}
            response = await fetch(
                *self._request(limit=_PAGE_ITEMS, **more), timeout_s=_LIST_S, max_bytes=_PAGE_BYTES
            )
            _check(response.status, response.body)
            try:
                pages.append(json.loads(response.body))
                following = pages[-1]["metadata"].get("continue")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise WatchError(f"no list of EndpointSlices: {error!r}") from None
        self._slices.replace(pages)

    async def _watch(self, report: "Callable[[View], None]") -> bool:
        """Take changes until the server ends the watch; return whether it was one of some length."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        endpoint, method, target, headers, body = self._request(
            watch=1,
            allowWatchBookmarks="true",
            resourceVersion=self._slices.version,
            timeoutSeconds=self._rng.randint(*_WATCH_S),
        )
        stream = LineStream()
        call = endpoint.request(method, target, headers, body, stream)
        changed = False
        try:
            async with asyncio.timeout(_ANSWER_S) as limit:
                await stream.answered.wait()
                limit.reschedule(clock() + _SILENCE_S)
                while (line := await stream.next()) is not None:
                    limit.reschedule(clock() + _SILENCE_S)
                    _check(stream.status, line)
                    changed |= self._slices.apply(line)
                    # What has come together is one reading.
                    if changed and not stream.waiting:
                        changed = False
                        report(self._slices.view())
                    self._backoff_s = _BACKOFF_S[0]
                _check(stream.status, b"")
        except TimeoutError:
            if not stream.answered.is_set():
                raise TimeoutError(f"no answer from {endpoint.name} in {_ANSWER_S:g} s") from None
            _log.debug("a watch of EndpointSlices fell silent")
        finally:
            call.abort()
            if changed:  # A line behind it could not be used.
                report(self._slices.view())
        if clock() - began_s < _SHORT_S:
            return False
        self._backoff_s = _BACKOFF_S[0]
        return True

    def _request(self, **query: object) -> "tuple[Endpoint, bytes, bytes, Headers, bytes]":
        """Return the server to ask, and the request; see `ApiClient.request`."""
        namespace = quote(self._namespace or self._api.namespace)
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return self._api.request(
            b"GET", f"{path}?{urlencode({'labelSelector': self._selector, **query})}"
        )


def _check(status: int, body: bytes) -> None:
    """Raise an error unless the answer is 200."""
    if status != 200:
        kind = ExpiredError if status == _GONE else WatchError
        raise kind(why_refused(status, body))
