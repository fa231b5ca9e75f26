"""The pages of the admin listener: health, metrics, the proxy's state, and orders to change it.

    GET  /                        the page for people, which asks for the rest; needs no token
    GET  /health                  200 while the process serves; needs no token
    GET  /ready                   200 if it takes requests, else 503; needs no token
    GET  /metrics                 for Prometheus
    GET  /admin/state             everything; with ?requests=1 each live request too
    GET  /admin/live              what the page shows, every 0.8 s, as server-sent events
    GET  /admin/requests?id=ID    the requests of an id: those that live, and of the last 1,000
    GET  /admin/instances         the engines, with the requests in flight on each
    GET  /admin/groups            the groups, if there are several
    POST /admin/groups            add one: what its [[model]] table would have
    POST /admin/groups/drain      nothing new goes to its engines: {"group"}
    POST /admin/groups/remove     forget one that is drained: {"group", "force"?}
    POST /admin/instances         add one: {"role", "url", "ranks"?, "bootstrap"?, "group"?, "kv_events"?,
                                  "kv_replay"?}
    POST /admin/instances/drain   nothing new goes there: {"role", "url", "wait_s"?, "deadline_s"?}
    POST /admin/instances/remove  forget one that is drained: {"role", "url", "force"?}
    POST /admin/policy            {"policy", "group"?}
    POST /admin/log-level         {"level"}
    POST /admin/reload            {}: read keys, certificates and tenants again
    /pause, /resume, /is_paused, /abort_requests    around an update of the weights: `pages.py`;
    /sleep, /wake_up, /is_sleeping, /update_weights ..  likewise
    /workers, /workers/ID         engines, as training frameworks list, add and remove them: `Workers`
    /list_workers, /add_worker, /remove_worker      likewise

With several groups of engines, "group" names the one that an order is about. Paths are exact. Bodies are
JSON, whatever their Content-Type says. Without a token no web page can give orders to a listener on
loopback: see `check_host`. The log has every order, with the address it came from. Errors have the shape of
`openai.errors`.
"""

import asyncio
import json
import logging
import platform
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from math import inf
from typing import Any, Protocol
from urllib.parse import parse_qs

from balanceroute import __version__
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.orders import (
    OrderRefusal,
    UnknownInstanceError,
    address_of,
    event_addresses_of,
    force_of,
    group_of,
    instance_of,
    read_order,
    seconds_of,
    text_of,
)
from balanceroute.proxy.live.control.pages import (
    ABORT,
    COMMON_HEADERS,
    EVENTS,
    HEADERS,
    PAGE,
    LiveView,
    PausePages,
    Routes,
    answering,
    as_json,
    asked_of,
    begin,
    saying,
    send_json,
    where,
)
from balanceroute.proxy.live.control.pages import PATHS as PAUSE_PATHS
from balanceroute.proxy.live.control.pausing import Pausing
from balanceroute.proxy.live.control.roster import Addition, EngineOrders
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Status
from balanceroute.proxy.live.security import Secret, bearer_token, check_host
from balanceroute.proxy.live.telemetry.metrics import CONTENT_TYPE
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Reply, bracketed

# Engines as training frameworks list, add and remove them at a router: `/workers` of the admin
# listener.
#
#     GET    /workers       all: {"workers": [..], "total"}
#     POST   /workers       add one: {"url", "worker_type": "prefill" or "decode", "ranks"?, "bootstrap_port"?}
#     GET    /workers/ID    one
#     DELETE /workers/ID    nothing new goes there; it is forgotten when nothing is in flight there any more
#     GET    /list_workers  {"urls": [..]}
#     POST   /add_worker    ?url=, and the other members likewise
#     POST   /remove_worker ?url=: as DELETE, in every role that it has
#
# The paths and members are those of sgl-model-gateway, and 202 is its answer to an order; the last three
# are those of vllm-router, which answers 200. A name is made of an engine's role and address, so that it
# stays over restarts.

PATH = b"/workers"
# Members that are allowed, though the proxy finds them out by itself or does not need them.
MORE_OF_A_WORKER = frozenset(
    {"ranks", "bootstrap_port", "cost", "group", "labels", "model_id", "priority", "runtime"}
)
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_ID_DIGITS = 16


class InstanceRows:
    """The rows of all instances, made once for all that wait for some of them."""

    def __init__(self, make: Callable[[], list[dict[str, object]]]) -> None:
        self._make = make
        self._rows: list[dict[str, object]] = []
        self._made_s = -inf

    def after(self, looked_s: float | None) -> list[dict[str, object]]:
        """Return rows that were made after a time of the loop's clock; None for now."""
        if looked_s is None or self._made_s <= looked_s:
            self._rows, self._made_s = self._make(), asyncio.get_running_loop().time()
        return self._rows


class Workers:
    """Lists, adds and removes engines."""

    def __init__(self, engines: EngineOrders, rows: InstanceRows) -> None:
        self._engines = engines
        self._rows = rows

    def all(self) -> dict[str, object]:
        found = list(map(_worker, self._rows.after(None)))
        return {"workers": found, "total": len(found)}

    def one(self, path: bytes) -> dict[str, object]:
        """Return the worker of a path. Raises UnknownInstanceError."""
        return _worker(self._row(path))

    async def add(self, order: Mapping[str, Any]) -> dict[str, object]:
        """Add an engine.

        Raises:
            ConfigError: A member is wrong, or the engine cannot be added.
            ConflictError: It is there already.
        """
        url, kind, ranks = order.get("url"), order.get("worker_type"), order.get("ranks")
        if not isinstance(url, str):
            raise ConfigError("url must be a text")
        role = _ROLES.get(kind) if isinstance(kind, str) else None
        if role is None:
            raise ConfigError(f"worker_type is {kind!r}, must be prefill or decode")
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise ConfigError("ranks must be a positive integer")
        address = EngineUrl.parse(url)
        bootstrap = _bootstrap(address, order.get("bootstrap_port"))
        group = order.get("group")
        if not (group is None or isinstance(group, str)):
            raise ConfigError("group must be a text")
        await self._engines.add(Addition(role, url, ranks, bootstrap=bootstrap), group)
        return _accepted(role.value, address.base)

    def urls(self) -> dict[str, object]:
        return {"urls": list(dict.fromkeys(row["url"] for row in self._rows.after(None)))}

    def remove_url(self, url: str) -> dict[str, object]:
        """Have the engine of an address removed, in every role that it has; see `remove`.

        Raises:
            ConfigError: It is no address.
            UnknownInstanceError: There is none.
        """
        base = EngineUrl.parse(url).base
        rows = [row for row in self._rows.after(None) if row["url"] == base]
        if not rows:
            raise UnknownInstanceError(f"there is no worker {base}")
        for row in rows:
            self._remove(row)
        return _accepted(str(rows[0]["role"]), base)

    def remove(self, path: bytes) -> dict[str, object]:
        """Have the engine of a path removed as soon as nothing is in flight on it; return the answer.

        Raises:
            UnknownInstanceError: There is none.
        """
        row = self._row(path)
        self._remove(row)
        return _accepted(str(row["role"]), row["url"])

    def _remove(self, row: Mapping[str, object]) -> None:
        role, url = Role(row["role"]), str(row["url"])
        self._engines.having(role, url).remove_when_idle(role, url)

    def _row(self, path: bytes) -> dict[str, object]:
        worker_id = path[len(PATH) + 1 :].decode("latin-1")
        for row in self._rows.after(None):
            if _id(row["role"], row["url"]) == worker_id:
                return row
        raise UnknownInstanceError(f"there is no worker {worker_id}")


def _bootstrap(address: EngineUrl, port: object) -> str | None:
    if port is None:
        return None
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ConfigError("bootstrap_port must be from 1 to 65535")
    return f"http://{bracketed(address.host)}:{port}"


def _id(role: object, url: object) -> str:
    return sha256(f"{role} {url}".encode()).hexdigest()[:_ID_DIGITS]


def _accepted(role: str, url: object) -> dict[str, object]:
    name = _id(role, url)
    return {"status": "accepted", "worker_id": name, "url": url, "location": f"/workers/{name}"}


def _worker(row: Mapping[str, object]) -> dict[str, object]:
    return {
        "id": _id(row["role"], row["url"]),
        "url": row["url"],
        "worker_type": row["role"],
        "is_healthy": row["status"] == Status.UP.value,
        "status": row["status"],
        "load": row["in_flight"],
    }


CONNECTIONS = 32
"""Of the admin listener at a time."""
KEPT = 4
"""Of them, for requests that are answered at once: probes, metrics and most orders."""
MAX_BODY_BYTES = 1 << 20
"""Of an order; the listener refuses a larger one. An update of the weights names each of them."""
MAX_ADDITIONS = 16
"""Additions that may go on at a time: each asks the new instance for its ranks."""
MAX_WAITS = CONNECTIONS - KEPT
"""Requests that hold a connection until something is done: orders that are waited for, and live views."""
_WAIT_STEP_S = 0.25

_MORE_OF_AN_INSTANCE = frozenset({"ranks", "bootstrap", "group", "kv_events", "kv_replay"})
# An order now would not reach the process that takes over; it takes orders in about a second.
_TAKING_OVER = "a new version of the proxy is taking over: order again"
_OPEN_PATHS = frozenset({b"/", b"/health", b"/liveness", b"/ready", b"/readiness", b"/healthcheck"})

_log = logging.getLogger(__name__)


class Control(Protocol):
    """The proxy, as the pages show and change it. Orders raise ConfigError, UnknownInstanceError, ConflictError."""

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""

    @property
    def pausing(self) -> Pausing:
        """Pauses, resumes and aborts."""

    def state(self, *, requests: bool) -> dict[str, object]:
        """Return `state`, or `groups` by name, with each live request if asked."""

    def instance_rows(self) -> list[dict[str, object]]:
        """Return every instance, with the requests in flight on it."""

    def view(self) -> dict[str, object]:
        """Return what the page shows."""

    def request_rows(self, request_id: str) -> list[dict[str, object]]:
        """Return the requests that have an id, of those that live and the latest that ended."""

    def set_policy(self, name: str, group: str | None = None) -> None:
        """Decide by another policy from now on, in one of several groups."""

    def set_log_level(self, level: str) -> None:
        """Change how much is logged."""

    def reload(self) -> dict[str, object]:
        """Read keys, certificates and tenants again; return how many there are."""


class Admin:
    """The application of the admin listener: call it with a request and where its answer goes.

    Args:
        more_routes: Returns the pages about groups, given the additions under way.
        token: What a request must present; None to ask for nothing, which is for a listener
            that only this machine can reach.
        names: What Host may say without a token, in lower case, beside loopback.
    """

    def __init__(
        self,
        control: Control,
        engines: EngineOrders,
        *,
        more_routes: Callable[[set[asyncio.Task[None]]], Routes] = lambda _: {},
        page_of_metrics: Callable[[], bytes],
        config: Mapping[str, object],
        token: Secret | None,
        names: Collection[str] = (),
    ) -> None:
        self._control = control
        self._engines = engines
        self._page_of_metrics = page_of_metrics
        # JSON has no infinity, which some limits are set to: those become texts.
        self._config = json.loads(json.dumps(config, default=as_json), parse_constant=str)
        self.token = token
        self._names = names
        self._live_view = LiveView(control.view)
        self._rows = InstanceRows(control.instance_rows)
        self._workers = Workers(engines, self._rows)
        self._additions: set[asyncio.Task[None]] = set()
        self._waits: set[asyncio.Task[None]] = set()
        self._pauses: set[asyncio.Task[None]] = set()
        self.takes_orders = True
        self._routes: Routes = {
            b"/": {b"GET": self._page},
            **{
                path: {b"GET": saying(lambda _: {"status": "ok"})}
                for path in (b"/health", b"/liveness")
            },
            **{path: {b"GET": self._ready} for path in (b"/ready", b"/readiness", b"/healthcheck")},
            b"/metrics": {b"GET": self._metrics},
            b"/admin/state": {b"GET": self._state},
            b"/admin/live": {b"GET": self._live},
            b"/admin/requests": {b"GET": self._requests},
            b"/admin/instances": {b"GET": self._instances, b"POST": self._add},
            b"/admin/instances/drain": {b"POST": self._drain},
            b"/admin/instances/remove": {b"POST": self._remove},
            b"/admin/policy": {b"POST": self._set_policy},
            b"/admin/log-level": {b"POST": self._set_log_level},
            b"/admin/reload": {b"POST": self._reload},
            PATH: {b"GET": saying(lambda _: self._workers.all()), b"POST": self._add_worker},
            b"/list_workers": {b"GET": saying(lambda _: self._workers.urls())},
            b"/add_worker": {b"POST": self._add_by_query},
            b"/remove_worker": {b"POST": self._remove_by_query},
        }
        self._routes |= PausePages(control.pausing, self._pauses, self._check_places).routes
        self._routes |= more_routes(self._additions)
        self._of_worker = {
            b"GET": saying(lambda request: self._workers.one(request.path)),
            b"DELETE": self._remove_worker,
        }
        # Those that take a query.
        self._asking = (self._state, self._requests, self._add_by_query, self._remove_by_query)

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request, now or when what it asks for is done."""
        with answering(reply):
            self._authorise(request)
            named = request.path.startswith(PATH + b"/")
            methods = self._of_worker if named else self._routes.get(request.path)
            if methods is None:
                raise OrderRefusal(404, "there is no such page")
            handler = methods.get(b"GET" if request.method == b"HEAD" else request.method)
            if handler is None:
                allowed = b", ".join(methods).replace(b"GET", b"GET, HEAD")
                raise OrderRefusal(
                    405, f"the page knows {allowed.decode()}", headers=[(b"allow", allowed)]
                )
            asks = request.path in PAUSE_PATHS or handler in self._asking
            if request.query and not asks:
                raise OrderRefusal(400, "the page takes no query")
            # An order to abort is about requests of this process.
            orders = request.method not in (b"GET", b"HEAD") and request.path != ABORT
            if orders and not self.takes_orders:
                raise OrderRefusal(503, _TAKING_OVER, headers=[(b"retry-after", b"1")])
            handler(request, reply)

    async def stop_orders(self, limit_s: float) -> None:
        """Refuse orders from now on; return when those that change something have ended, or time is up."""
        self.takes_orders = False
        if changes := self._additions | self._pauses:
            await asyncio.wait(changes, timeout=limit_s)

    def close(self) -> None:
        """Give up the additions and the waits that go on, and end the live views."""
        self._live_view.close()
        for task in (*self._additions, *self._waits, *self._pauses):
            task.cancel()

    @property
    def going_on(self) -> int:
        """How many orders are being carried out, or waited for."""
        return len(self._additions) + len(self._waits) + len(self._pauses)

    def knows(self, headers: Headers) -> bool:
        """Return whether these are the headers of an administrator, where there is a token."""
        return self.token is not None and self.token.matches(bearer_token(headers))

    def _check_places(self) -> None:
        """Raise Refusal if one more may not hold a connection."""
        if self.going_on + self._live_view.viewers >= MAX_WAITS:
            raise OrderRefusal(429, f"too many orders and views go on: {MAX_WAITS} at a time")

    def _check_additions(self) -> None:
        if len(self._additions) >= MAX_ADDITIONS:
            raise OrderRefusal(429, "too many instances are being added")
        self._check_places()

    def _authorise(self, request: HttpRequest) -> None:
        if request.path in _OPEN_PATHS:
            return
        if self.token is None:
            foreign = check_host(request.headers, self._names)
            if foreign is not None:
                _log.warning("admin: refused what a web page may have sent", extra=where(request))
                raise OrderRefusal(foreign.status, foreign.message)
            return
        if not self.knows(request.headers):
            _log.warning("admin: refused a request without the token", extra=where(request))
            raise OrderRefusal(
                401, "the token is missing or wrong", headers=[(b"www-authenticate", b"Bearer")]
            )

    def _page(self, _request: HttpRequest, reply: Reply) -> None:
        reply.send(200, [*HEADERS, *COMMON_HEADERS], PAGE)

    def _ready(self, _request: HttpRequest, reply: Reply) -> None:
        ready = self._control.ready
        send_json(reply, 200 if ready else 503, {"status": "ready" if ready else "not ready"})

    def _metrics(self, _request: HttpRequest, reply: Reply) -> None:
        page = self._page_of_metrics()
        reply.send(200, [(b"content-type", CONTENT_TYPE.encode()), *COMMON_HEADERS], page)

    def _state(self, request: HttpRequest, reply: Reply) -> None:
        if request.query not in {b"", b"requests=0", b"requests=1"}:
            raise OrderRefusal(400, "the page takes requests=1 and nothing else", param="requests")
        state = {
            "versions": {"balanceroute": __version__, "python": platform.python_version()},
            "config": self._config,
            **self._control.state(requests=request.query == b"requests=1"),
        }
        send_json(reply, 200, state)

    def _live(self, request: HttpRequest, reply: Reply) -> None:
        if request.method == b"HEAD":
            reply.send(200, EVENTS, b"")
        elif self._live_view.full:
            raise OrderRefusal(503, "too many look at the live view")
        else:
            self._check_places()
            self._live_view.open(reply)

    def _requests(self, request: HttpRequest, reply: Reply) -> None:
        asked = parse_qs(request.query.decode("latin-1"))
        if asked.keys() != {"id"} or len(asked["id"]) != 1:
            raise OrderRefusal(400, "the page takes id=REQUEST_ID and nothing else", param="id")
        send_json(reply, 200, {"requests": self._control.request_rows(asked["id"][0])})

    def _instances(self, _request: HttpRequest, reply: Reply) -> None:
        send_json(reply, 200, {"instances": self._control.instance_rows()})

    def _add(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"role", "url"}, optional=_MORE_OF_AN_INSTANCE)
        role, url = instance_of(order)
        bootstrap = address_of(order, "bootstrap") if "bootstrap" in order else None
        kv_events, kv_replay = event_addresses_of(order)
        group = group_of(order)
        ranks = order.get("ranks")
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise OrderRefusal(400, "ranks must be a positive integer", param="ranks")
        addition = Addition(
            role, url, ranks, bootstrap=bootstrap, kv_events=kv_events, kv_replay=kv_replay
        )
        self._check_additions()

        async def add() -> None:
            with answering(reply):
                await self._engines.add(addition, group)
                _log.info("admin: added an instance", extra=where(request, order))
                self._instances(request, reply)

        begin(self._additions, add())

    def _drain(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"role", "url"}, optional={"wait_s", "deadline_s"})
        role, url = instance_of(order)
        wait_s = seconds_of(order, "wait_s") or 0.0
        deadline_s = seconds_of(order, "deadline_s")
        if wait_s:
            self._check_places()
        self._engines.having(role, url).drain(role, url, deadline_s=deadline_s)
        _log.info("admin: drains an instance", extra=where(request, order))
        if not wait_s:
            self._instances(request, reply)
            return

        async def wait() -> None:
            with answering(reply):
                await self._until_idle(role, url, wait_s)
                self._instances(request, reply)

        begin(self._waits, wait())

    async def _until_idle(self, role: Role, url: str, limit_s: float) -> None:
        """Wait until nothing is in flight on an instance. Raises Refusal: not in time."""
        base, clock = EngineUrl.parse(url).base, asyncio.get_running_loop().time
        end_s = clock() + limit_s
        looked_s: float | None = None
        while True:
            rows = self._rows.after(looked_s)
            looked_s = clock()
            # One that is gone meanwhile has nothing.
            in_flight = [
                row["in_flight"] for row in rows if (row["role"], row["url"]) == (role.value, base)
            ]
            if not any(in_flight):
                return
            if clock() >= end_s:
                raise OrderRefusal(504, f"{in_flight[0]} requests are in flight on {base} still")
            await asyncio.sleep(_WAIT_STEP_S)

    def _remove(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"role", "url"}, optional={"force"})
        force, (role, url) = force_of(order), instance_of(order)
        self._engines.having(role, url).remove(role, url, force=force)
        _log.info("admin: removed an instance", extra=where(request, order))
        self._instances(request, reply)

    def _add_worker(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"url", "worker_type"}, optional=MORE_OF_A_WORKER)
        self._begin_adding(request, reply, order, 202)

    def _begin_adding(
        self, request: HttpRequest, reply: Reply, order: dict[str, object], status: int
    ) -> None:
        self._check_additions()

        async def add() -> None:
            with answering(reply):
                send_json(reply, status, await self._workers.add(order))
                _log.info("admin: added a worker", extra=where(request, order))

        begin(self._additions, add())

    def _remove_worker(self, request: HttpRequest, reply: Reply) -> None:
        answer = self._workers.remove(request.path)
        _log.info("admin: removes a worker", extra=where(request, answer))
        send_json(reply, 202, answer)

    def _add_by_query(self, request: HttpRequest, reply: Reply) -> None:
        order: dict[str, object] = {**asked_of(request, "url", "worker_type", *MORE_OF_A_WORKER)}
        for name in ("ranks", "bootstrap_port"):
            said = str(order.get(name, ""))
            if said.isascii() and said.isdigit():
                order[name] = int(said[:9])
        self._begin_adding(request, reply, order, 200)

    def _remove_by_query(self, request: HttpRequest, reply: Reply) -> None:
        url = asked_of(request, "url").get("url")
        if url is None:
            raise OrderRefusal(400, "url is missing", param="url")
        answer = self._workers.remove_url(url)
        _log.info("admin: removes a worker", extra=where(request, answer))
        send_json(reply, 200, answer)

    def _set_policy(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"policy"}, optional={"group"})
        self._control.set_policy(text_of(order, "policy"), group_of(order))
        _log.info("admin: changed the policy", extra=where(request, order))
        send_json(reply, 200, order)

    def _set_log_level(self, request: HttpRequest, reply: Reply) -> None:
        order = read_order(request, required={"level"})
        self._control.set_log_level(text_of(order, "level"))
        _log.info("admin: changed the log level", extra=where(request, order))
        send_json(reply, 200, order)

    def _reload(self, request: HttpRequest, reply: Reply) -> None:
        read_order(request, required=set())
        counts = self._control.reload()
        _log.info("admin: read keys, certificates and tenants again", extra=where(request))
        send_json(reply, 200, counts)
