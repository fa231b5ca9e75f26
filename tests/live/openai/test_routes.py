"""The routes: each is served by whom the table says, and docs/appendix/routes.md says the same."""

import gzip
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Site, answering, served

from balanceroute.proxy.live.openai.routes import CONTROL, ROUTES, Handling, Media, find

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

PAGE = Path(__file__).parents[3] / "docs" / "appendix" / "routes.md"
RESPONSES = "/v1/responses"
BATCH = "/v1/chat/completions/batch"
# What vLLM says of itself, for `scripts/checks`.
SCHEMA = Path(__file__).parents[3] / "scripts" / "checks" / "vllm_openapi.json.gz"
OPERATORS = {"/scale_elastic_ep", "/is_scaling_elastic_ep", "/kv_event_sources"}
SINGLE = [route for route in ROUTES if route.handling is Handling.SINGLE_ENGINE]


def documented() -> dict[str, tuple[set[str], str]]:
    """Return each path of the table of routes, with its methods and the words beside it."""
    table = PAGE.read_text(encoding="utf-8").split("| route | served by |")[1].split("\n\n")[0]
    found: dict[str, tuple[set[str], str]] = {}
    for row in table.splitlines()[2:]:
        routes, words = (cell.strip() for cell in row.strip("|").split("|"))
        method = ""
        for name, path in re.findall(r"`(?:([A-Z]+) )?(/[^`]+)`", routes):
            method = name or method
            methods, _ = found[path] = found.get(path, (set(), ""))[0], words
            methods |= {method} - {""}
    return found


def test_the_documented_routes_are_those_that_are_served() -> None:
    pages = documented()
    # What is not served by itself may be an order.
    routes = {route.path: route for route in (*ROUTES, *CONTROL)}
    assert pages.keys() == routes.keys()
    for route in routes.values():
        methods, words = pages[route.path]
        served = {method.decode() for method in route.methods}
        assert methods == served - {"HEAD"}, route.path
        assert words.startswith(route.handling.value), route.path
        if route.media is Media.FORM:
            assert route.media.value in words
        if route.handling is Handling.OWN:
            assert ("without an API key" in words) is not route.keyed


def test_each_route_that_vllm_describes_is_known() -> None:
    paths = json.loads(gzip.decompress(SCHEMA.read_bytes()))["paths"]
    described = {re.sub(r"\{.*?\}", "{id}", path) for path in paths}
    assert described - {route.path for route in (*ROUTES, *CONTROL)} == OPERATORS


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/v1/responses", RESPONSES),
        (b"/v1/responses/resp_1", "/v1/responses/{id}"),
        (b"/v1/responses/a/b", "/v1/responses/{id}"),
        (b"/v1/responses/resp_1/cancel", "/v1/responses/{id}/cancel"),
        (b"/v1/responses/render", "/v1/responses/render"),
        (b"/v1/responses/", RESPONSES),
        (b"/v1/responses//", "/v1/responses/{id}"),
        (b"/v1/models/", "/v1/models"),
        (b"/v1/chat/completions//", None),
        (b"/", None),
        (b"/v1/responsesx", None),
        (b"/v1", None),
        (b"", None),
    ],
)
def test_a_path_is_matched_as_a_whole(path: bytes, expected: str | None) -> None:
    route = find(path)
    assert (None if route is None else route.path) == expected


@pytest.mark.parametrize("route", SINGLE, ids=lambda route: route.path)
@served()
async def test_what_one_engine_answers_reaches_a_prefiller_as_it_came(
    site: Site, route: Any
) -> None:
    form = route.media is Media.FORM
    body = b"" if route.media is Media.NONE else b'{"model": "tiny",  "input": "t1"}'
    kind = b"multipart/form-data; boundary=b1" if form else b"application/json"

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.send(200, [(b"content-type", b"application/x-answer")], b"answer")

    site.handlers[route.path.encode()] = answer
    for name in route.methods:
        method = name.decode()
        exchange = site.send(route.path, body, method=method, headers=[(b"content-type", kind)])
        got = await exchange.end()
        assert (got.status, got.body) == (200, b"" if method == "HEAD" else b"answer")
        assert got.header(b"content-type") == b"application/x-answer"
        seen = site.seen[-1]
        assert seen.engine.startswith("prefill/")
        assert seen.request.body == body
        assert seen.request.method == (b"GET" if method == "HEAD" else name)
        assert seen.header(b"content-type") == kind


@served()
async def test_no_member_that_steers_kv_transfer_reaches_an_engine(site: Site) -> None:
    site.handlers[BATCH.encode()] = answering(200, b"{}", kind=None)
    body = {"messages": [], "kv_transfer_params": {"do_remote_prefill": True}}
    assert (await site.post(BATCH, body)).status == 200
    assert site.seen[-1].values == {"messages": []}
    site.seen.clear()
    refused = await site.post(BATCH, {"vllm_xargs": {"kv_transfer_params": "x"}})
    assert refused.status == 400
    assert refused.json["error"]["param"] == "vllm_xargs"
    assert "kv_transfer_params" in refused.json["error"]["message"]
    assert (await site.post(BATCH, b"no JSON")).status == 400
    assert site.seen == []


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.reason], ids=lambda route: route.path
)
@served()
async def test_what_is_not_served_says_why(site: Site, route: Any) -> None:
    refused = await site.post(route.path.replace("{id}", "resp_1"), {})
    assert refused.status == 404
    assert route.reason in refused.json["error"]["message"]
    assert site.seen == []


@pytest.mark.parametrize(
    ("member", "value"), [("previous_response_id", "resp_1"), ("background", True)]
)
@served()
async def test_a_response_that_somebody_must_keep_is_refused(
    site: Site, member: str, value: object
) -> None:
    """Such a request went to a random rank, which knew nothing of the other response."""
    refused = await site.post(RESPONSES, {"model": "tiny", "input": "t1", member: value})
    assert refused.status == 400
    assert refused.json["error"]["param"] == member
    assert "not kept" in refused.json["error"]["message"]
    assert site.seen == []


@served()
async def test_store_is_let_pass_since_engines_ignore_it(site: Site) -> None:
    body = {"input": "t1", "store": True, "background": False, "previous_response_id": None}
    assert (await site.post(RESPONSES, body)).status == 200
    # A prefiller keeps nothing, whatever its settings.
    assert [seen.values["store"] for seen in site.seen] == [False, True]


@served()
async def test_ping_and_load_are_the_proxys_own(site: Site) -> None:
    for method in ("GET", "HEAD", "POST"):
        assert (await site.send("/ping", method=method).end()).status == 200
    assert (await site.get("/load")).json == {"server_load": 0}
    prompt = {"model": "tiny", "prompt": "t1", "max_tokens": 50, "ignore_eos": True}
    running = site.send("/v1/completions", prompt | {"stream": True})
    await running.until_events(1)
    assert (await site.get("/load")).json == {"server_load": 1}
    await running.end()
    assert {seen.path for seen in site.seen} == {"/v1/completions"}
