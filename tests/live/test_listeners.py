"""Orders of administrators on the clients' port (`--control-on-api-port`), and who may give them."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.leader.replicas import Replicas, play_replicas
from tests.live.test_proxy_connectors import CHAT, TALK
from tests.support.site import Exchanged, Site, served, served_by_groups

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.admin import CONNECTIONS, MAX_BODY_BYTES, MAX_WAITS, Admin
from balanceroute.proxy.live.openai.routes import CONTROL, FANNED_OUT
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.wire.http1.client import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers, HttpRequest

TOKEN, KEY = "the-token", "a-client"
LONG: dict[str, Any] = TALK | {"temperature": 0, "stream": True, "max_tokens": 400}
ROUTES = [
    (method.decode(), route.path.replace("{id}", "0123456789abcdef"))
    for route in CONTROL
    for method in route.methods
]
ENGINES = 4


def bearer(key: str) -> "Headers":
    return [(b"authorization", b"Bearer " + key.encode())]


ADMIN, CLIENT = bearer(TOKEN), bearer(KEY)


def secret(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def on(tmp_path: Path) -> dict[str, object]:
    return off(tmp_path) | {"control_on_api_port": True}


def off(tmp_path: Path) -> dict[str, object]:
    token, keys = secret(tmp_path, "token", TOKEN), secret(tmp_path, "keys", KEY)
    return {"admin_token_file": token, "api_key_file": keys}


async def order(
    site: Site, path: str, values: object = b"", *, method: str = "POST", headers: "Headers" = ADMIN
) -> Exchanged:
    return await site.send(path, values, method=method, headers=headers).end()


def message(answer: Exchanged) -> str:
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    assert answer.header(b"x-request-id")
    return str(error["message"])


class Updated:
    """Notes the orders that engines get as they are; those of `failing` answer 500, of `silent` never."""

    def __init__(self, site: Site, failing: str = "-", silent: str = "-") -> None:
        self.heard: list[tuple[str, str, bytes]] = []
        self.said: dict[str, Any] = {"message": "done"}
        self._failing, self._silent = failing, silent
        for path in FANNED_OUT:
            site.handlers[path.encode()] = self._take

    def _take(self, engine: str, request: "HttpRequest", reply: "Reply") -> None:
        query = f"?{request.query.decode()}" if request.query else ""
        self.heard.append((engine, request.path.decode() + query, request.body))
        if not engine.startswith(self._silent):
            status = 500 if engine.startswith(self._failing) else 200
            reply.send(
                status, [(b"content-type", b"application/json")], json.dumps(self.said).encode()
            )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        (bearer("wrong"), 401),
        (CLIENT, 403),
        ([(b"x-api-key", KEY.encode())], 403),
        ([(b"x-api-key", TOKEN.encode())], 401),
        ([(b"authorization", b"Basic " + TOKEN.encode())], 401),
        ([*ADMIN, *ADMIN], 401),
    ],
    ids=str,
)
@served(flags=on)
async def test_only_an_administrator_gives_orders(
    site: Site, tmp_path: Path, headers: "Headers", status: int
) -> None:
    del tmp_path
    Updated(site)
    for method, path in ROUTES:
        answer = await order(site, path, {}, method=method, headers=headers)
        assert answer.status == status, path
        if method != "HEAD":
            assert message(answer).startswith("Forbidden" if status == 403 else "Unauthorized")
        asks = answer.header(b"www-authenticate")
        assert asks == (b"Bearer" if status == 401 else None)
    assert not site.seen
    assert len(site.world.plane.deployment.roster.targets()) == ENGINES
    assert (await order(site, CHAT, TALK, headers=CLIENT)).status == 200
    # The token is no client's key.
    assert (await order(site, CHAT, TALK)).status == 401


@served(flags=off)
async def test_where_it_is_off_there_is_nothing_to_find(site: Site, tmp_path: Path) -> None:
    del tmp_path
    for headers in (ADMIN, CLIENT, []):
        unknown = await order(site, "/nothing", {}, headers=headers)
        for method, path in ROUTES:
            answer = await order(site, path, {}, method=method, headers=headers)
            assert answer.status == unknown.status == 404
            if method != "HEAD" and path != "/abort_requests":
                assert answer.json == unknown.json
    assert (await site.send("/workers", method="GET", headers=ADMIN).end()).status == 404
    port = site.world.plane.admin
    assert port is not None
    listed = await site.send("/workers", method="GET", headers=ADMIN, port=port.port).end()
    assert listed.json["total"] == ENGINES


@pytest.mark.parametrize("keys", [True, False])
def test_without_a_token_it_is_refused(tmp_path: Path, keys: bool) -> None:
    flags: dict[str, object] = {
        "prefill": ["http://127.0.0.1:1"],
        "decode": ["http://127.0.0.1:2"],
        "control_on_api_port": True,
    }
    if keys:
        flags["api_key_file"] = secret(tmp_path, "keys", KEY)
    for admin in (True, False):
        with pytest.raises(ConfigError, match=r"^--control-on-api-port: .*--admin-token-file$"):
            make_config(None, flags | {"admin": admin})
    flags["admin_token_file"] = secret(tmp_path, "token", TOKEN)
    assert make_config(None, flags | {"admin": False}).credentials.admin_token is not None


@served(flags=lambda tmp_path: on(tmp_path) | {"admin": False})
async def test_it_needs_no_admin_listener(site: Site, tmp_path: Path) -> None:
    del tmp_path
    assert site.world.plane.admin is None
    assert (await order(site, "/pause")).json["status"] == "paused"
    assert (await order(site, "/is_paused", method="GET")).json == {"is_paused": True}
    assert (await order(site, "/resume")).json["status"] == "resumed"
    # As where it is off.
    assert (await order(site, "/admin/state", method="GET")).status == 404


@served(flags=lambda tmp_path: on(tmp_path) | {"api_key_file": None})
async def test_where_clients_need_no_key_orders_need_the_token(site: Site, tmp_path: Path) -> None:
    del tmp_path
    for headers in ([], CLIENT):
        assert (await order(site, "/pause", headers=headers)).status == 401
    assert (await order(site, CHAT, TALK, headers=[])).status == 200
    assert (await order(site, "/is_sleeping/", method="GET")).json == {"is_sleeping": False}


def test_the_routes_are_those_of_the_admin_listener() -> None:
    async def main() -> None:
        bench: Any = type("Bench", (), {"pausing": None, "view": None, "instance_rows": None})()
        made = Admin(bench, bench, page_of_metrics=bytes, config={}, token=None)
        routes = made._routes | {b"/workers/{id}": made._of_worker}
        for route in CONTROL:
            methods = set(routes[route.path.encode()])
            assert methods == set(route.methods) - {b"HEAD"}, route

    asyncio.run(main())


@served(flags=on)
async def test_workers_are_listed_removed_and_added(site: Site, tmp_path: Path) -> None:
    del tmp_path
    url = site.fleet.engine("decode/0").url
    roster = site.world.plane.deployment.roster
    listed = await order(site, "/workers", method="GET")
    urls = [one["url"] for one in listed.json["workers"]]
    assert (await order(site, "/list_workers", method="GET")).json == {"urls": urls}
    assert url in urls
    bad = await order(site, f"/add_worker?url={url}")
    assert (bad.status, message(bad)) == (
        400,
        "worker_type is None, must be prefill or decode",
    )
    assert (await order(site, f"/add_worker?url={url}&worker_type=decode")).status == 409
    for path in ("/remove_worker", "/remove_worker?url=http://127.0.0.1:9&url=b"):
        assert (await order(site, path)).status == 400
    assert (await order(site, "/remove_worker?url=http://127.0.0.1:9")).status == 404
    removed = await order(site, f"/remove_worker?url={url}")
    assert (removed.status, removed.json["url"]) == (200, url)
    await site.until(lambda: len(roster.targets()) == ENGINES - 1)
    assert url not in (await order(site, "/list_workers", method="GET")).json["urls"]
    quoted = url.replace(":", "%3A").replace("/", "%2F")
    added = await order(site, f"/add_worker?url={quoted}&worker_type=decode&ranks=1&priority=3")
    assert (added.status, added.json["worker_id"]) == (200, removed.json["worker_id"])
    one = await order(site, added.json["location"], method="GET")
    assert (one.status, one.json["url"]) == (200, url)
    gone = await order(site, added.json["location"], method="DELETE")
    assert gone.status == 202
    await site.until(lambda: len(roster.targets()) == ENGINES - 1)
    again = await order(site, "/workers/", {"url": url, "worker_type": "decode", "ranks": 1})
    assert again.status == 202
    assert len(roster.targets()) == ENGINES


@served(flags=on)
async def test_a_pause_while_requests_run(site: Site, tmp_path: Path) -> None:
    del tmp_path
    streams = [site.send(CHAT, LONG, headers=CLIENT) for _ in range(4)]
    for stream in streams:
        await stream.until_events(9)
    paused = await order(site, "/pause?mode=abort")
    assert (paused.status, paused.json["aborted"]) == (200, 4)
    assert len(paused.json["engines"]) == ENGINES
    for stream in streams:
        assert (await stream.end()).done
    waiting = site.send(CHAT, TALK, headers=CLIENT)
    await asyncio.sleep(30.0)
    assert not waiting.over
    assert (await order(site, "/is_paused", method="GET")).json == {"is_paused": True}
    assert (await order(site, "/resume")).status == 200
    assert (await waiting.end()).status == 200
    assert (await order(site, "/abort_requests", {})).json["aborted"] == 0


@served(flags=on)
async def test_an_update_goes_to_all_engines_as_it_came(site: Site, tmp_path: Path) -> None:
    del tmp_path
    engines = Updated(site)
    names = [f"model.layers.{n}.mlp.experts.7.down_proj.weight" for n in range(4_000)]
    for values in ({"update_info": {"names": names}}, {"init_info": {"port": 1, "nested": [[]]}}):
        engines.heard.clear()
        answer = await order(site, "/update_weights?timeout_s=900&tag=a%26b", values)
        assert answer.status == 200
        assert answer.json["success"] is True
        assert [one["answer"] for one in answer.json["engines"]] == [engines.said] * ENGINES
        body = json.dumps(values).encode()
        assert {(path, sent) for _, path, sent in engines.heard} == {
            ("/update_weights?tag=a%26b", body)
        }
        assert len({engine for engine, *_ in engines.heard}) == ENGINES
    engines.heard.clear()
    assert (await order(site, "/flush_cache")).status == 200
    assert {one[1:] for one in engines.heard} == {("/reset_prefix_cache", b"{}")}
    engines.said = {"success": False}
    refused = await order(site, "/reset_prefix_cache?reset_external=true")
    assert (refused.status, refused.json["success"]) == (200, False)
    for path in FANNED_OUT:
        assert (await order(site, path)).status == 200
    for bad in (b"[]", b"{", b'{"a": 1, "a": 2}', b"[" * 5_000):
        assert (await order(site, "/update_weights", bad)).status == 400
    for query in ("timeout_s=nan", "timeout_s=-1", "timeout_s=1&timeout_s=2"):
        assert (await order(site, f"/update_weights?{query}")).status == 400


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b"[1e999]",
        b"9" * 5_000,
        b"[" * 900 + b"]" * 900,
        b'"\xff"',
        b'"\\ud800"',
    ],
    ids=lambda said: repr(said[:9]),
)
@served(flags=on)
async def test_engines_may_answer_anything(site: Site, tmp_path: Path, said: bytes) -> None:
    del tmp_path
    site.handlers[b"/collective_rpc"] = lambda _, __, reply: reply.send(200, [], said)
    answer = await order(site, "/collective_rpc", {"method": "m"})
    assert (answer.status, answer.json["success"]) == (200, True)
    assert len(answer.json["engines"]) == ENGINES


@served(flags=on)
async def test_of_engines_that_fail_the_answer_tells(site: Site, tmp_path: Path) -> None:
    del tmp_path
    engines = Updated(site, failing="decode/1", silent="prefill/0")
    engines.said = {"results": "x" * (1 << 17)}
    answer = await order(site, "/collective_rpc?timeout_s=30", {"method": "m"})
    assert (answer.status, answer.json["success"]) == (502, False)
    rows = {one["url"]: one for one in answer.json["engines"]}
    told = {name: rows[site.fleet.engine(name).url] for name in ("decode/1", "prefill/0")}
    assert told["decode/1"]["status"] == 500
    assert told["prefill/0"]["status"] is None
    assert told["prefill/0"]["error"]
    assert sorted(str(one["status"]) for one in rows.values()) == ["200", "200", "500", "None"]
    # An answer that is too long is left out.
    assert {one["answer"] for one in rows.values()} == {None}
    site.handlers.clear()
    lacking = await order(site, "/update_weights", {})
    assert lacking.status == 502
    assert {one["status"] for one in lacking.json["engines"]} == {404}


def chunked(body: bytes) -> "Iterator[bytes]":
    yield from (b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n")


@served(flags=on)
async def test_orders_have_the_limits_of_the_admin_listener(site: Site, tmp_path: Path) -> None:
    del tmp_path
    large = b'{"a": "%b"}' % (b"x" * MAX_BODY_BYTES)
    told = await order(site, "/update_weights", large)
    assert (told.status, message(told)) == (413, f"an order may have {MAX_BODY_BYTES} bytes")
    reader, writer = await asyncio.open_connection("127.0.0.1", site.world.port)
    head = b"POST /update_weights HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %b\r\n"
    writer.write(head % TOKEN.encode() + b"transfer-encoding: chunked\r\n\r\n")
    writer.writelines(chunked(large))
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    stream = site.send(CHAT, LONG, headers=CLIENT)
    await stream.until_events(2)
    waits = [site.send("/pause?mode=wait&engines=false", headers=ADMIN) for _ in range(MAX_WAITS)]
    await asyncio.sleep(0.01)
    for path in ("/pause?mode=wait", "/update_weights", "/sleep"):
        assert (await order(site, path)).status == 429
    # What is short has places of its own.
    assert (await order(site, "/is_paused", method="GET")).json == {"is_paused": True}
    Updated(site, silent="")
    site.handlers[b"/wake_up"] = lambda *_: None
    more = [site.send("/wake_up", headers=ADMIN) for _ in range(CONNECTIONS)]
    await asyncio.sleep(0.01)
    refused = [one for one in more if one.over]
    assert [one.status for one in refused] == [429] * MAX_WAITS
    assert "at a time" in message(refused[0])
    for one in (stream, *waits, *more):
        await one.end()
    assert {one.status for one in waits} == {200}
    assert (await order(site, "/resume")).status == 200


@served(flags=on)
async def test_orders_end_and_go_on_with_those_of_the_admin_listener(
    site: Site, tmp_path: Path
) -> None:
    await site.world.plane.stop_orders()
    refused = await order(site, "/pause")
    assert (refused.status, refused.header(b"retry-after")) == (503, b"1")
    assert "taking over" in message(refused)
    assert (await order(site, "/workers", method="GET")).status == 200
    site.world.plane.take_orders()
    assert (await order(site, "/pause")).status == 200
    # A token that is renewed holds from the next order on.
    secret(tmp_path, "token", "another")
    site.world.plane.reload()
    assert (await order(site, "/resume")).status == 401
    assert (await order(site, "/resume", headers=bearer("another"))).status == 200


@served(flags=on)
async def test_an_order_that_goes_on_is_answered_by_a_proxy_that_drains(
    site: Site, tmp_path: Path
) -> None:
    del tmp_path
    stream = site.send(CHAT, LONG, headers=CLIENT)
    await stream.until_events(9)
    paused = site.send("/pause?mode=wait&engines=false", headers=ADMIN)
    await asyncio.sleep(0.01)
    await site.world.plane.drain()
    assert stream.done
    assert (await paused.end()).status == 200


def test_who_follows_takes_orders(tmp_path: Path) -> None:
    async def scenario(site: Replicas) -> None:
        follower = site.other(await site.leader())
        await asyncio.sleep(3.0)
        assert (await site.send(follower, "/v1/completions", {"prompt": "x"}).end()).status == 401
        endpoint = Endpoint("127.0.0.1", follower.port)
        for method, path in ((b"POST", b"/pause"), (b"GET", b"/is_paused"), (b"POST", b"/resume")):
            answer = Exchanged()
            endpoint.request(method, path, ADMIN, b"", answer)
            assert (await answer.end()).status == 200
        endpoint.close()

    play_replicas(scenario, flags=on(tmp_path))


@served_by_groups(flags=on)
async def test_orders_are_about_the_engines_of_all_groups(site: Site, tmp_path: Path) -> None:
    del tmp_path
    fleets = site.world.fleets  # type: ignore[attr-defined]
    Updated(site)
    answer = await order(site, "/update_weights", {})
    assert (answer.status, len(answer.json["engines"])) == (200, 7)
    listed = (await order(site, "/list_workers", method="GET")).json["urls"]
    assert len(listed) == 7
    url = fleets["large"].engine("decode/0").url
    assert (await order(site, f"/remove_worker?url={url}")).status == 200
    roster = site.world.plane.deployments["large"].roster
    await site.until(lambda: len(roster.targets()) == 3)
    path = f"/add_worker?url={url}&worker_type=decode&ranks=1"
    unnamed = await order(site, path)
    assert (unnamed.status, message(unnamed)) == (400, "group is missing, one of small, large")
    assert (await order(site, f"{path}&group=none")).status == 404
    assert (await order(site, f"{path}&group=large")).status == 200
    assert len(roster.targets()) == 4
    assert (await order(site, "/pause")).json["status"] == "paused"
    assert all(one.driver.scheduler.intake.held for one in site.world.plane.deployments.values())
    assert (await order(site, "/resume")).status == 200
    for model in ("small", "large"):
        values = TALK | {"model": model}
        assert (await order(site, CHAT, values, headers=CLIENT)).status == 200


@served(flags=lambda tmp_path: on(tmp_path) | {"cors_origin": ["https://trainer.example"]})
async def test_pages_of_other_sites_may_ask_as_for_the_api(site: Site, tmp_path: Path) -> None:
    del tmp_path
    origin = (b"origin", b"https://trainer.example")
    asked: Headers = [origin, (b"access-control-request-method", b"POST")]
    assert (await order(site, "/pause", method="OPTIONS", headers=asked)).status == 200
    answer = await order(site, "/is_paused", method="GET", headers=[*ADMIN, origin])
    assert answer.header(b"access-control-allow-origin") == b"https://trainer.example"
    assert (await order(site, "/is_paused", method="POST")).status == 405
