"""The admin listener: who may ask, what is answered, and what an order does."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.played import in_real_time, played_by
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute import __version__
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.admin import MAX_ADDITIONS, MAX_WAITS, Admin
from balanceroute.proxy.live.control.orders import ConflictError, UnknownInstanceError
from balanceroute.proxy.live.control.pausing import Pausing
from balanceroute.proxy.live.control.roster import Addition
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.security import as_secret
from balanceroute.proxy.live.telemetry.process_log import LOGGER
from balanceroute.proxy.live.telemetry.snapshot import (
    PrefillerState,
    RankState,
    RequestState,
    Snapshot,
)
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Reply, Response

if TYPE_CHECKING:
    from balanceroute.proxy.live.control.roster import EngineOrders

TOKEN = as_secret(b"admin-token")
GOOD = [(b"authorization", b"Bearer admin-token")]
JSON = [(b"content-type", b"application/json")]
CURLS = b"application/x-www-form-urlencoded"
SNAPSHOT = Snapshot(
    policy="br-h",
    predictor="survival",
    ranks=[RankState(0, "http://d:8000@0", True, "up", 4000, 3, 2, 13)],
    prefillers=[PrefillerState(0, "http://p:8000", True, "up", 2, 1, 3000, 0.25)],
    queued=5,
    prefilling=2,
    pooled=4,
    decoding=3,
    pool_limit=24,
    oldest_pooled_s=0.5,
    imbalance_tokens=3000,
    steps=7,
    step_s=0.03,
    idle_tokens=100,
    capacity_tokens=400,
    client_connections=11,
    engine_connections=6,
    draining=False,
    rows_judged=50,
    predictors=[],
)
LIVE = RequestState(4, "r4", "decoding", 100, 7, 1.5, "http://p:8000", "http://d:8000@0")


class Fleet:
    """A Control, its EngineOrders, and their only roster, that remembers what it was told."""

    def __init__(self) -> None:
        self.orders: list[tuple[object, ...]] = []
        self.ready = True
        self.pausing = Pausing(list)
        self.error: Exception | None = None
        self.in_flight = 2
        self.gate = asyncio.Event()
        self.gate.set()

    def _order(self, *order: object) -> None:
        if self.error is not None:
            raise self.error
        self.orders.append(order)

    def state(self, *, requests: bool) -> dict[str, object]:
        if self.error is not None:
            raise self.error
        return {"state": replace(SNAPSHOT, requests=[LIVE] if requests else [])}

    async def add(self, one: Addition, group: str | None) -> None:
        await self.gate.wait()
        more = filter(None, [group, one.kv_events, one.kv_replay])
        self._order("add", one.role, one.url, one.ranks, one.bootstrap, *more)

    def having(self, role: Role, url: str) -> "Fleet":
        del role, url
        return self

    def drain(self, role: Role, url: str, *, deadline_s: float | None = None) -> None:
        self._order("drain", role, url, *([] if deadline_s is None else [deadline_s]))

    def remove_when_idle(self, role: Role, url: str) -> None:
        self._order("remove when idle", role, url)

    def remove(self, role: Role, url: str, *, force: bool) -> None:
        self._order("remove", role, url, force)

    def instance_rows(self) -> list[dict[str, object]]:
        row = {"role": "decode", "url": "http://d:8000", "status": "draining"}
        return [row | {"in_flight": self.in_flight}]

    def view(self) -> dict[str, object]:
        if self.error is not None:
            raise self.error
        return {"policy": "br-h"}

    def request_rows(self, request_id: str) -> list[dict[str, object]]:
        return [{"request_id": request_id, "state": "decoding"}]

    def set_policy(self, name: str, group: str | None = None) -> None:
        self._order("policy", name, *filter(None, [group]))

    def set_log_level(self, level: str) -> None:
        self._order("log level", level)

    def reload(self) -> dict[str, object]:
        self._order("reload")
        return {"api_keys": 1, "tenants": 2}


class Sent:
    """A reply that keeps what is sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.done = asyncio.Event()
        self.closed = self.paused = False
        self.on_closed: Callable[[], None] | None = None

    def start(self, status: int, headers: Headers) -> None:
        self.send(status, headers, b"")

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.body += data

    def end(self) -> None:
        self.closed = True

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        assert not self.status, "answered twice"
        self.status, self.headers, self.body = status, dict(headers), body
        self.done.set()

    @property
    def json(self) -> dict[str, object]:
        decoded = json.loads(self.body)
        assert isinstance(decoded, dict)
        return decoded

    @property
    def message(self) -> str:
        error = self.json["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return str(error["message"])


class Bench:
    """An Admin and the fleet it controls."""

    def __init__(self, fleet: Fleet | None = None, *, token: bool = True) -> None:
        self.fleet = fleet or Fleet()
        self.admin = Admin(
            self.fleet,
            cast("EngineOrders", self.fleet),
            page_of_metrics=lambda: b"page 1\n",
            config={"port": 8000, "gamma": inf, "admin_token": TOKEN, "models": ("m",)},
            token=TOKEN if token else None,
            names={"ops.example"},
        )

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: bytes = b"",
        headers: Headers = GOOD,
        media: Headers = JSON,
    ) -> Sent:
        sent = Sent()
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = HttpRequest(
            method.encode(), path.encode(), query, [*headers, *media], encoded, "127.0.0.1:5"
        )
        self.admin(request, cast("Reply", sent))
        return sent

    def get(self, path: str, *, query: bytes = b"", headers: Headers = GOOD) -> Sent:
        return self.ask("GET", path, b"", query=query, headers=headers, media=[])

    def post(self, path: str, body: object) -> Sent:
        return self.ask("POST", path, body)


INSTANCE = {"role": "decode", "url": "http://d:8000"}
PAGES = ["/metrics", "/admin/state", "/admin/instances"]
ORDERS = {
    "/admin/instances": INSTANCE,
    "/admin/instances/drain": INSTANCE,
    "/admin/instances/remove": INSTANCE,
    "/admin/policy": {"policy": "br-0"},
    "/admin/reload": {},
    "/admin/log-level": {"level": "info"},
}


def test_the_state_shows_everything_and_no_secret() -> None:
    sent = Bench().get("/admin/state")
    assert sent.status == 200
    assert sent.json["config"] == {
        "port": 8000,
        "gamma": "Infinity",
        "admin_token": "Secret()",
        "models": ["m"],
    }
    versions = sent.json["versions"]
    assert isinstance(versions, dict)
    assert versions["balanceroute"] == __version__
    state = sent.json["state"]
    assert isinstance(state, dict)
    assert state["ranks"][0] == {
        "rank": 0,
        "name": "http://d:8000@0",
        "open": True,
        "status": "up",
        "kv_tokens": 4000,
        "bound": 3,
        "started": 2,
        "free_slots": 13,
        "others": 0,
        "speed": 1.0,
        "quarantine": {"reason": "", "since": None, "next_probe_s": None},
        "url": "",
        "doubts": [],
        "cached_blocks": None,
        "vetoes": 0,
        "dp_group": None,
        "at_barrier": True,
    }
    assert state["imbalance_tokens"] == 3000
    assert state["requests"] == []
    assert b"admin-token" not in sent.body


@pytest.mark.parametrize(("query", "shown"), [(b"", 0), (b"requests=0", 0), (b"requests=1", 1)])
def test_live_requests_are_shown_when_asked_for(query: bytes, shown: int) -> None:
    state = Bench().get("/admin/state", query=query).json["state"]
    assert isinstance(state, dict)
    assert len(state["requests"]) == shown


@pytest.mark.parametrize("query", [b"requests=2", b"requests", b"a=1", b"requests=1&requests=1"])
def test_an_unknown_query_is_refused(query: bytes) -> None:
    assert Bench().get("/admin/state", query=query).status == 400
    assert Bench().get("/metrics", query=query).status == 400


def test_metrics_are_served_as_text() -> None:
    sent = Bench().get("/metrics")
    assert (sent.status, sent.body) == (200, b"page 1\n")
    assert sent.headers[b"content-type"].startswith(b"text/plain; version=0.0.4")


def test_readiness_follows_the_proxy_and_health_does_not() -> None:
    bench = Bench()
    assert bench.get("/ready").status == 200
    bench.fleet.ready = False
    assert bench.get("/ready").status == 503
    assert bench.get("/health").status == 200


def test_instances_are_listed_with_what_is_in_flight() -> None:
    assert Bench().get("/admin/instances").json == {"instances": Fleet().instance_rows()}


def test_orders_reach_the_control() -> None:
    bench = Bench()
    assert bench.post("/admin/instances/drain", INSTANCE).status == 200
    assert bench.post("/admin/instances/remove", INSTANCE | {"force": True}).status == 200
    assert bench.post("/admin/instances/remove", INSTANCE).status == 200
    assert bench.post("/admin/policy", {"policy": "br-0"}).json == {"policy": "br-0"}
    assert bench.post("/admin/log-level", {"level": "debug"}).json == {"level": "debug"}
    assert bench.post("/admin/reload", {}).json == {"api_keys": 1, "tenants": 2}
    assert bench.fleet.orders == [
        ("drain", Role.DECODE, "http://d:8000"),
        ("remove", Role.DECODE, "http://d:8000", True),
        ("remove", Role.DECODE, "http://d:8000", False),
        ("policy", "br-0"),
        ("log level", "debug"),
        ("reload",),
    ]


@pytest.mark.parametrize("ranks", [8, None])
@in_real_time()
async def test_an_addition_is_answered_when_it_is_done(ranks: int | None) -> None:
    bench = Bench()
    bench.fleet.gate.clear()
    order: dict[str, object] = {**INSTANCE, "role": "prefill"}
    addresses = {"bootstrap": "http://d:8998"}
    if ranks is None:  # Then everything is said that a prefiller may have.
        addresses |= {"kv_events": "tcp://p:5557", "kv_replay": "tcp://[::1]:5558"}
    else:
        order["ranks"] = ranks
    sent = bench.post("/admin/instances", order | addresses)
    await asyncio.sleep(0)
    assert sent.status == 0
    assert bench.get("/admin/instances").status == 200
    bench.fleet.gate.set()
    await sent.done.wait()
    assert sent.status == 200
    assert bench.fleet.orders == [
        ("add", Role.PREFILL, "http://d:8000", ranks, *addresses.values())
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("url has no port"), 400),
        (UnknownInstanceError("there is no such decode instance"), 404),
        (ConflictError("2 requests are in flight"), 409),
    ],
)
@in_real_time()
async def test_the_controls_refusals_have_their_status(error: Exception, status: int) -> None:
    for path in ("/admin/instances", "/admin/instances/drain", "/admin/instances/remove"):
        bench = Bench()
        bench.fleet.error = error
        sent = bench.post(path, INSTANCE)
        await sent.done.wait()
        assert sent.status == status
        assert sent.message == str(error)


@in_real_time()
async def test_additions_at_a_time_are_bounded_and_end_with_the_listener() -> None:
    bench = Bench()
    bench.fleet.gate.clear()
    going_on = [bench.post("/admin/instances", INSTANCE) for _ in range(MAX_ADDITIONS)]
    assert bench.post("/admin/instances", INSTANCE).status == 429
    await asyncio.sleep(0)
    bench.admin.close()
    additions = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert len(additions) == MAX_ADDITIONS
    await asyncio.wait(additions)
    assert not any(sent.status for sent in going_on)
    assert bench.fleet.orders == []


def test_a_fault_of_ours_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.fleet.error = RuntimeError("the key is hunter2")
    sent = bench.get("/admin/state")
    assert sent.status == 500
    assert b"hunter2" not in sent.body
    assert "hunter2" in caplog.text


BAD_CREDENTIALS: list[Headers] = [
    [],
    [(b"authorization", b"Bearer wrong")],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"admin-token")],
    [(b"authorization", b"Basic admin-token")],
    [(b"authorization", b"Bearer  admin-token")],
    [(b"authorization", b"Bearer admin-token ")],
    [(b"authorization", b"Bearer admin-token2")],
    [(b"authorization", b"Bearer admin-toke")],
    [(b"authorization", b"Bearer ADMIN-TOKEN")],
    [(b"authorization", b"Bearer " + b"x" * 1_000_000)],
    [*GOOD, *GOOD],
    [*GOOD, (b"authorization", b"Bearer wrong")],
    [(b"cookie", b"authorization=Bearer admin-token")],
]


@pytest.mark.parametrize("headers", BAD_CREDENTIALS)
def test_without_the_token_nothing_is_shown_and_nothing_done(headers: Headers) -> None:
    bench = Bench()
    for path in [*PAGES, "/admin/live", "/admin/requests", "/admin/nothing", "//"]:
        sent = bench.get(path, headers=headers)
        assert sent.status == 401
        assert sent.headers[b"www-authenticate"] == b"Bearer"
        assert sent.message == "the token is missing or wrong"
    for path, body in ORDERS.items():
        assert bench.ask("POST", path, body, headers=headers).status == 401
    assert bench.fleet.orders == []


@pytest.mark.parametrize(
    ("method", "path", "headers", "token"),
    [
        ("GET", "/health", [], True),  # These two need none.
        ("GET", "/ready", [], True),
        ("GET", "/admin/state", [(b"authorization", b"bEARER admin-token")], True),
        ("GET", "/admin/state", [], False),  # None is configured.
        ("HEAD", "/admin/state", GOOD, True),
    ],
)
def test_who_is_answered(method: str, path: str, headers: Headers, token: bool) -> None:
    sent = Bench(token=token).ask(method, path, b"", headers=headers, media=[])
    assert sent.status == 200
    assert b"admin-token" not in sent.body


@pytest.mark.parametrize(
    "path",
    [
        *("/index.html", "/admin", "/admin/", "/admin/state/", "//admin/state", "/admin//state"),
        *("/admin/../admin/state", "/Admin/State", "/admin/state%2f", "/admin/state;x", "*"),
        *("/admin/instances/add", "/v1/chat/completions", "/metrics/", "http://h/metrics"),
    ],
)
def test_paths_are_exact(path: str) -> None:
    assert Bench().get(path).status == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/admin/state", b"GET, HEAD"),
        ("DELETE", "/admin/instances", b"GET, HEAD, POST"),
        ("GET", "/admin/instances/drain", b"POST"),
        ("PUT", "/admin/policy", b"POST"),
        ("OPTIONS", "/admin/policy", b"POST"),
        ("get", "/metrics", b"GET, HEAD"),
        ("TRACE", "/health", b"GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allow: bytes) -> None:
    sent = Bench().ask(method, path)
    assert sent.status == 405
    assert sent.headers[b"allow"] == allow


# One order needs no members.
@pytest.mark.parametrize("path", [path for path, order in ORDERS.items() if order])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 50_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"role": "decode", "role": "prefill"}', "appears twice"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"NaN", "must be a JSON object"),
        (b"{}", "is missing"),
    ],
)
def test_a_body_that_is_no_order_is_refused(path: str, body: bytes, reason: str) -> None:
    bench = Bench()
    sent = bench.post(path, body)
    assert sent.status == 400
    assert reason in sent.message
    assert bench.fleet.orders == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/instances", INSTANCE | {"ranks": 0}),
        ("/admin/instances", INSTANCE | {"ranks": True}),
        ("/admin/instances", INSTANCE | {"ranks": 8.0}),
        ("/admin/instances", INSTANCE | {"ranks": "8"}),
        ("/admin/instances", INSTANCE | {"bootstrap": ""}),
        ("/admin/instances", INSTANCE | {"bootstrap": 8998}),
        ("/admin/instances", INSTANCE | {"weight": 1}),
        ("/admin/instances", INSTANCE | {"kv_events": "http://p:5557"}),
        ("/admin/instances", INSTANCE | {"kv_events": 5557}),
        ("/admin/instances", INSTANCE | {"kv_replay": "tcp://p:5558"}),
        ("/admin/instances", {"role": "both", "url": "http://d:8000"}),
        ("/admin/instances", {"role": ["decode"], "url": "http://d:8000"}),
        ("/admin/instances", {"role": "decode", "url": ""}),
        ("/admin/instances", {"role": "decode", "url": "h" * 2049}),
        ("/admin/instances", {"role": "decode", "url": 8000}),
        ("/admin/instances", {"role": "decode"}),
        ("/admin/instances/remove", INSTANCE | {"force": 1}),
        ("/admin/instances/drain", INSTANCE | {"force": True}),
        ("/admin/policy", {"policy": None}),
        ("/admin/policy", {"policy": "br-0", "role": "decode"}),
        ("/admin/log-level", {"level": ["debug"]}),
        ("/admin/reload", {"tenants": True}),
    ],
)
def test_an_order_of_the_wrong_shape_is_refused(path: str, body: object) -> None:
    bench = Bench()
    sent = bench.post(path, body)
    assert sent.status == 400
    assert sent.message
    assert bench.fleet.orders == []


@pytest.mark.parametrize(
    "media",
    [
        [],
        *([(b"content-type", value)] for value in (b"text/plain", CURLS, b"application/json; a=b")),
    ],
)
def test_an_order_is_json_whatever_it_is_called(media: Headers) -> None:
    bench = Bench()
    assert bench.ask("POST", "/admin/policy", {"policy": "br-0"}, media=media).status == 200
    assert bench.fleet.orders == [("policy", "br-0")]


# What a web page could have sent.

FOREIGN: list[Headers] = [
    # After the page's own name was made to resolve to loopback.
    [(b"host", b"evil.example")],
    [(b"host", b"evil.example:9000"), (b"origin", b"http://evil.example:9000")],
    [(b"host", b"localhost.evil.example")],
    [(b"host", b"127.0.0.1.evil.example:9000")],
    [(b"host", b"10.0.0.1:9000")],
    [(b"host", b"")],
    [(b"host", b":9000")],
    # No way to write loopback.
    *(
        [(b"host", host)]
        for host in (
            *(b"[[::1]]", b"[[::1]]:9000", b"]localhost[", b"[localhost]", b"[127.0.0.1]:9000"),
            *(
                b"[::1",
                b"::1]",
                b"]::1[",
                b"::1",
                b"[]",
                b"[::1]x",
                b"[::1]:9000:9000",
                b"[ff02::1]",
            ),
        )
    ),
    # From another site, or another port of this machine.
    [(b"host", b"127.0.0.1:9000"), (b"origin", b"https://evil.example")],
    [(b"host", b"127.0.0.1:9000"), (b"origin", b"http://127.0.0.1:8080")],
    [(b"host", b"localhost:9000"), (b"origin", b"http://127.0.0.1:9000")],
    [(b"host", b"localhost:9000"), (b"origin", b"null")],
    [(b"host", b"localhost:9000"), (b"origin", b"")],
    [
        (b"host", b"localhost:9000"),
        (b"origin", b"http://localhost:9000"),
        (b"origin", b"http://evil.example"),
    ],
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_without_a_token_no_web_page_is_obeyed(
    headers: Headers, caplog: pytest.LogCaptureFixture
) -> None:
    """After DNS rebinding a page on an operator's machine could add an engine."""
    bench = Bench(token=False)
    for path, body in ORDERS.items():
        sent = bench.ask("POST", path, body, headers=headers, media=[])
        assert sent.status == 403
        assert sent.message
    for path in PAGES:
        assert bench.get(path, headers=headers).status == 403
    assert bench.fleet.orders == []
    assert len(caplog.records) == len(ORDERS) + len(PAGES)
    for path in ("/health", "/ready"):  # What they say is no secret, and probes call by any name.
        assert bench.get(path, headers=headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],  # HTTP/1.0.
        *(
            [(b"host", host)]
            for host in (
                *(b"localhost", b"LocalHost:9000", b"127.0.0.1", b"127.0.0.1:9000", b"127.1.2.3:1"),
                *(b"[::1]", b"[::1]:9000", b"ops.example:443", b"Ops.Example"),
            )
        ),
        [(b"host", b"localhost:9000"), (b"origin", b"http://LOCALHOST:9000")],
        [(b"host", b"ops.example"), (b"origin", b"https://ops.example")],
    ],
)
def test_without_a_token_its_own_names_are_obeyed(headers: Headers) -> None:
    bench = Bench(token=False)
    assert bench.ask("POST", "/admin/policy", {"policy": "br-0"}, headers=headers).status == 200
    assert bench.get("/admin/state", headers=headers).status == 200


@pytest.mark.parametrize("headers", FOREIGN)
def test_with_a_token_any_name_will_do(headers: Headers) -> None:
    bench = Bench()
    assert bench.get("/admin/state", headers=[*GOOD, *headers]).status == 200
    assert bench.get("/admin/state", headers=headers).status == 401


def test_orders_and_refused_tokens_leave_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    bench = Bench()
    bench.post("/admin/instances/drain", INSTANCE)
    bench.get("/admin/state", headers=[])
    fields = [vars(record)["fields"] for record in caplog.records]
    assert fields[0] == {"peer": "127.0.0.1:5", "order": json.dumps(INSTANCE)}
    assert fields[1] == {"peer": "127.0.0.1:5"}
    assert "admin-token" not in caplog.text


def test_answers_are_not_cached() -> None:
    bench = Bench()
    for path in [*PAGES, "/health", "/ready", "/nothing"]:
        assert bench.get(path).headers[b"cache-control"] == b"no-store"


@in_real_time()
async def test_it_is_an_application_of_the_http_server() -> None:
    server = Server(Bench().admin)
    await server.start("127.0.0.1", 0)
    endpoint = Endpoint("127.0.0.1", server.port)

    async def ask(method: bytes, path: bytes, body: bytes = b"", **headers: bytes) -> Response:
        fields = [(name.encode(), value) for name, value in headers.items()]
        return await fetch(endpoint, method, path, fields, body, timeout_s=5.0, max_bytes=65_536)

    assert (await ask(b"GET", b"/ready")).status == 200
    assert (await ask(b"GET", b"/admin/state")).status == 401
    added = await ask(
        b"POST",
        b"/admin/instances",
        json.dumps(INSTANCE).encode(),
        authorization=b"Bearer admin-token",
    )
    assert added.status == 200
    assert json.loads(added.body) == {"instances": Fleet().instance_rows()}
    endpoint.close()
    server.close()
    await server.drain()


@given(path=st.sampled_from(sorted(ORDERS)), body=st.binary(max_size=60) | st.text(max_size=60))
def test_no_body_makes_a_500(path: str, body: bytes | str) -> None:
    encoded = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    assert Bench().post(path, encoded).status == 400


# Waiting for the end of a drain.


def waited(scenario: Callable[[Bench], Awaitable[None]]) -> None:
    """Play a scenario in virtual time."""

    async def main(_: VirtualLoop) -> None:
        bench = Bench()
        await scenario(bench)
        bench.admin.close()

    run(main, seed=1, limit_s=10_000.0)


waiting = played_by(waited)


@pytest.mark.parametrize("deadline_s", [None, 5])
@waiting()
async def test_a_drain_may_be_answered_when_nothing_is_in_flight_any_more(
    bench: Bench, deadline_s: int | None
) -> None:
    url = "HTTP://D:8000/"  # It is the same address.
    more = {} if deadline_s is None else {"deadline_s": deadline_s}
    order = INSTANCE | {"url": url, "wait_s": 60} | more
    sent = bench.post("/admin/instances/drain", order)
    assert bench.fleet.orders == [("drain", Role.DECODE, url, *more.values())]
    await asyncio.sleep(30.0)
    assert sent.status == 0
    bench.fleet.in_flight = 0
    await asyncio.sleep(1.0)
    assert sent.status == 200
    assert sent.json["instances"] == bench.fleet.instance_rows()


@waiting()
async def test_a_drain_that_does_not_end_in_time_says_so(bench: Bench) -> None:
    sent = bench.post("/admin/instances/drain", INSTANCE | {"wait_s": 2.5})
    await asyncio.sleep(2.4)
    assert sent.status == 0
    await asyncio.sleep(0.5)
    assert sent.status == 504
    assert sent.message == "2 requests are in flight on http://d:8000 still"


@waiting()
async def test_an_engine_that_is_gone_meanwhile_is_drained(bench: Bench) -> None:
    sent = bench.post(
        "/admin/instances/drain", {"role": "prefill", "url": "http://p:1", "wait_s": 9}
    )
    await asyncio.sleep(0.1)
    assert sent.status == 200


@pytest.mark.parametrize("name", ["wait_s", "deadline_s"])
@pytest.mark.parametrize("seconds", [-1, "3", True, None, 86_401, inf])
def test_how_long_is_a_number(name: str, seconds: object) -> None:
    bench = Bench()
    assert bench.post("/admin/instances/drain", INSTANCE | {name: seconds}).status == 400
    assert bench.fleet.orders == []


@waiting()
async def test_who_waits_is_limited(bench: Bench) -> None:
    order = INSTANCE | {"wait_s": 60}
    for _ in range(MAX_WAITS):
        bench.post("/admin/instances/drain", order)
    assert bench.post("/admin/instances/drain", order).status == 429
    # Nobody else may hold a connection, and who does not is served still.
    for path in ("/pause", "/sleep"):
        assert bench.ask("POST", path, b"", query=b"mode=wait").status == 429, path
    assert bench.post("/admin/instances", INSTANCE).status == 429
    assert bench.get("/admin/live").status == 429
    assert bench.post("/admin/instances/drain", INSTANCE).status == 200
    assert bench.get("/health").status == 200
