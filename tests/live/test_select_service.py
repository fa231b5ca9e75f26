"""The select service over HTTP: its verbs, its key, and what callers must not do to it."""

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.live.settings.configs import of_flags
from tests.script import ROOT, script
from tests.support.site import Exchanged, Scenario, Site, play, play_groups

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live import select_service
from balanceroute.proxy.live.select_service import (
    _MOST_ASKED,
    BLOCK_TOKENS,
    MAX_BODY_BYTES,
    SelectService,
)
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

KEY = "a-key-of-routers"
emulated, proxy_before = script("experiment").emulated, script("experiment").proxy_before
BATCH = 2
BEARER: "Headers" = [(b"authorization", b"Bearer " + KEY.encode())]


def on(tmp_path: Path) -> dict[str, object]:
    path = tmp_path / "select-keys"
    path.touch(0o600)
    path.write_text(f"another-key\n{KEY}\n")
    own = {"select_key_file": str(path), "select_port": 0, "scrape_interval_s": 0.5}
    return {"batch": BATCH, **own}


def asked(**more: object) -> Callable[[Scenario], Callable[[Path], None]]:
    """Return a decorator that makes a test of a scenario with the service on, and these flags."""

    def make(scenario: Scenario) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            play(scenario, flags=on(tmp_path) | more)

        return test

    return make


def service_of(site: Site) -> SelectService:
    service = site.world.proxy.select_service
    assert service is not None
    return service


def send(
    site: Site,
    path: str,
    values: object = b"",
    *,
    method: str = "POST",
    headers: "Headers | None" = None,
) -> Exchanged:
    headers = BEARER if headers is None else headers
    port = service_of(site).server.port
    return site.send(path, values, method=method, headers=headers, port=port)


async def call(site: Site, path: str, values: object = b"", **more: Any) -> Exchanged:
    return await send(site, path, values, **more).end()


async def get(site: Site, path: str) -> Any:
    answer = await call(site, path, method="GET")
    assert answer.status == 200, answer.body
    return answer.json


async def reserved(site: Site, name: str, tokens: int = 100, **more: object) -> Any:
    """Reserve a request's prefiller."""
    body = {"selection_id": name, "isl_tokens": tokens} | more
    answer = await call(site, "/select_and_reserve", body)
    assert answer.status == 200, answer.body
    return answer.json


async def on_rank(site: Site, name: str, tokens: int = 100) -> Any:
    await reserved(site, name, tokens)
    answer = await call(site, f"/reservations/{name}/prefill_complete")
    assert answer.status == 200, answer.body
    return answer.json


def error(answer: Exchanged, status: int) -> str:
    assert answer.status == status, answer.body
    assert answer.json.keys() == {"error"}
    return str(answer.json["error"])


def loads(rows: Any) -> dict[tuple[int, int], Any]:
    return {(one["worker_id"], one["dp_rank"]): one for one in rows[0]["loads"]}


@asked()
async def test_a_request_goes_through_all_verbs(site: Site) -> None:
    chosen = await reserved(site, "one", expected_output_tokens=40, max_tokens=64)
    assert chosen["role"] == "prefill"
    assert chosen["selection_id"] == chosen["reservation_id"] == "one"
    assert (chosen["model_name"], chosen["routing_group"]) == ("default", "default")
    assert chosen["effective_prefill_tokens"] == 100
    place = chosen["worker_id"], chosen["dp_rank"]
    assert loads(await get(site, "/loads"))[place]["potential_prefill_tokens"] == 100
    rank = (await call(site, "/reservations/one/prefill_complete", {"isl_tokens": 90})).json
    assert (rank["status"], rank["role"]) == ("ok", "decode")
    again = (await call(site, "/reservations/one/prefill_complete")).json
    assert again == rank
    place = rank["worker_id"], rank["dp_rank"]
    assert loads(await get(site, "/loads"))[place]["kv_tokens"] == 90
    for _ in range(2):
        answer = await call(site, "/reservations/one/output_block", {"decay_fraction": 0.5})
        assert answer.json == {"status": "ok"}
    await asyncio.sleep(0.5)
    row = loads(await get(site, "/loads"))[place]
    assert (row["active_requests"], row["kv_tokens"]) == (1, 90 + 2 * BLOCK_TOKENS)
    ended = await call(site, "/reservations/one", {"output_tokens": 40}, method="DELETE")
    assert ended.json == {"status": "ok"}
    assert loads(await get(site, "/loads"))[place]["active_requests"] == 0
    (record,) = await site.ended()
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == (Outcome.OK, 90, 40)


@asked()
async def test_workers_are_the_servers_of_engines(site: Site) -> None:
    rows = await get(site, "/workers")
    instances = site.world.proxy.deployment.instances
    servers = {one.target for one in instances.prefillers}
    servers |= {one.target for one in instances.ranks}
    assert len(rows) == len({one["worker_id"] for one in rows}) == len(servers)
    assert sum(one["data_parallel_size"] for one in rows if one["role"] == "decode") == len(
        instances.ranks
    )
    assert {one["lifecycle"] for one in rows} == {"schedulable"}
    rank = instances.ranks[0]
    site.world.proxy.deployment.roster.drain(rank.target.role, rank.target.url)
    told = [one["lifecycle"] for one in await get(site, "/workers?model_name=default")]
    assert "draining" in told
    for method, path in (("POST", "/workers"), ("PATCH", "/workers/3"), ("DELETE", "/workers/3")):
        answer = await call(site, path, {"worker_id": 3}, method=method)
        assert "admin listener" in error(answer, 405)
    ready = await call(site, "/ready", method="GET", headers=[])
    assert ready.json == {"ready": True, "schedulable_workers": told.count("schedulable")}


@asked()
async def test_a_selection_is_reserved_where_it_said(site: Site) -> None:
    await on_rank(site, "busy")
    body = {"selection_id": "two", "isl_tokens": 50, "phase": "decode"}
    seen = (await call(site, "/select", body)).json
    assert seen["role"] == "decode"
    assert sum(row["active_requests"] for row in (await get(site, "/loads"))[0]["loads"]) == 1
    booked = await call(site, "/reservations", {"selection_id": "two"})
    assert booked.status == 201
    assert [booked.json[one] for one in ("worker_id", "dp_rank", "endpoint")] == [
        seen[one] for one in ("worker_id", "dp_rank", "endpoint")
    ]
    # It is replayed once.
    assert "selection" in error(await call(site, "/reservations", {"selection_id": "two"}), 404)
    explicit = {"selection_id": "three", "isl_tokens": 50, **{k: seen[k] for k in ("worker_id",)}}
    assert (await call(site, "/reservations", explicit)).json["worker_id"] == seen["worker_id"]
    for name in ("busy", "two", "three"):
        assert (await call(site, f"/reservations/{name}", method="DELETE")).status == 200


@asked()
async def test_only_the_allowed_workers_are_chosen(site: Site) -> None:
    prefillers = [one for one in await get(site, "/workers") if one["role"] == "prefill"]
    for row in prefillers:
        for place in range(2):
            name = f"{row['worker_id']}-{place}"
            chosen = await reserved(site, name, allowed_worker_ids=[row["worker_id"]])
            assert chosen["worker_id"] == row["worker_id"]
            answer = await call(site, f"/reservations/{name}/prefill_complete")
            assert answer.json["role"] == "decode"
            await call(site, f"/reservations/{name}", method="DELETE")


@asked()
async def test_who_is_allowed_nobody_gets_nobody(site: Site) -> None:
    for path in ("/select", "/select_and_reserve"):
        for phase in ("prefill", "decode"):
            body: dict[str, object] = {"isl_tokens": 5, "phase": phase, "allowed_worker_ids": []}
            assert "allowed_worker_ids" in error(await call(site, path, body), 503)
    assert len(service_of(site)._selector) == 0


@asked()
async def test_a_selection_that_is_refused_may_be_asked_for_again(site: Site) -> None:
    await reserved(site, "one")
    await call(site, "/select", {"selection_id": "one", "isl_tokens": 50})
    assert "in use" in error(await call(site, "/reservations", {"selection_id": "one"}), 409)
    await call(site, "/reservations/one", method="DELETE")
    assert (await call(site, "/reservations", {"selection_id": "one"})).status == 201
    await call(site, "/reservations/one", method="DELETE")
    assert "selection" in error(await call(site, "/reservations", {"selection_id": "one"}), 404)


@asked()
async def test_queries_have_bounds(site: Site) -> None:
    many = "&".join(f"a{number}=1" for number in range(9))
    for path in ("/loads", "/workers"):
        assert "query" in error(await call(site, f"{path}?{many}", method="GET"), 400)
        once = await get(site, f"{path}?model_name=default")
        assert await get(site, f"{path}?{'&'.join(['model_name=default'] * 8)}") == once
        assert await get(site, f"{path}?model_name=%ff%00&b=%zz") == once


@asked(lease_s=300)
async def test_a_rank_is_waited_for(site: Site) -> None:
    instances = site.world.proxy.deployment.instances
    assert (await reserved(site, "first"))["pull_within_s"] == 297.5
    await call(site, "/reservations/first", method="DELETE")
    names = [f"held{i}" for i in range(BATCH * len(instances.ranks))]
    held = [await on_rank(site, name) for name in names]
    await reserved(site, "last")
    waiting = send(site, "/reservations/last/prefill_complete")
    for name in names:  # Else they end by their engines' counters.
        await call(site, f"/reservations/{name}/output_block", {"output_tokens": 1})
    assert not waiting.over
    await call(site, f"/reservations/{names[0]}", method="DELETE")
    assert (await waiting.end()).json["worker_id"] == held[0]["worker_id"]
    for name in (*names[1:], "last"):
        await call(site, f"/reservations/{name}", method="DELETE")


# Hostile callers.


@pytest.mark.parametrize(
    "header",
    [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", b"Bearer")],
        [*BEARER, *BEARER],
    ],
    ids=["none", "wrong", "scheme", "empty", "twice"],
)
def test_without_a_key_nothing_is_told(header: "Headers", tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        body = {"selection_id": "one", "isl_tokens": 5}
        for path, method in (
            ("/select_and_reserve", "POST"),
            ("/loads", "GET"),
            ("/workers", "GET"),
            ("/reservations/one", "DELETE"),
            ("/potential_loads", "POST"),
            ("/overlap_scores", "POST"),
            ("/dump", "GET"),
            ("/nowhere", "GET"),
        ):
            answer = await call(site, path, body, method=method, headers=header)
            assert "key" in error(answer, 401)
        assert (await call(site, "/health", method="GET", headers=[])).status == 200
        assert len(service_of(site)._selector) == 0

    play(scenario, flags=on(tmp_path))


BAD: Mapping[str, tuple[object, str]] = {
    "malformed": (b'{"isl_tokens": 5,}', "byte 17"),
    "empty": (b"", "body"),
    "no text": (b'{"model_name": "\xff"}', "body"),
    "an array": (b"[1]", "Expected `object`"),
    "deep": (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
    "no tokens": ({"selection_id": "a"}, "isl_tokens is required"),
    "zero": ({"isl_tokens": 0}, "$.isl_tokens"),
    "negative": ({"isl_tokens": -5}, "$.isl_tokens"),
    "huge": ({"isl_tokens": 10**12}, "$.isl_tokens"),
    "beyond integers": (b'{"isl_tokens": 1' + b"0" * 5_000 + b"}", "isl_tokens"),
    "a fraction": ({"isl_tokens": 1.5}, "$.isl_tokens"),
    "a text": ({"isl_tokens": "5"}, "$.isl_tokens"),
    "true": ({"isl_tokens": True}, "$.isl_tokens"),
    "no token ids": ({"token_ids": []}, "$.token_ids"),
    "a negative token": ({"token_ids": [1, -2]}, "$.token_ids[1]"),
    "output": ({"isl_tokens": 5, "expected_output_tokens": -1}, "$.expected_output_tokens"),
    "limit": ({"isl_tokens": 5, "max_tokens": 0}, "$.max_tokens"),
    "phase": ({"isl_tokens": 5, "phase": "both"}, "$.phase"),
    "block size": ({"isl_tokens": 5, "block_size": 0}, "$.block_size"),
    "hash": ({"isl_tokens": 5, "sequence_hashes": [1 << 64]}, "$.sequence_hashes[0]"),
    "id": ({"isl_tokens": 5, "selection_id": "a b"}, "visible characters"),
    "long id": ({"isl_tokens": 5, "selection_id": "a" * 600}, "$.selection_id"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told_with_its_place(name: str, tmp_path: Path) -> None:
    body, words = BAD[name]

    async def scenario(site: Site) -> None:
        assert words in error(await call(site, "/select_and_reserve", body), 400)
        assert len(service_of(site)._selector) == 0
        await reserved(site, "next")
        await call(site, "/reservations/next", method="DELETE")

    play(scenario, flags=on(tmp_path))


# Of an id no more is made than a text.
@pytest.mark.parametrize("name", [name for name in BAD if name != "id"])
@pytest.mark.parametrize("path", ["/potential_loads", "/select"])
def test_so_it_is_where_nothing_is_reserved(path: str, name: str, tmp_path: Path) -> None:
    body, words = BAD[name]

    async def scenario(site: Site) -> None:
        assert words in error(await call(site, path, body), 400)

    play(scenario, flags=on(tmp_path))


@asked(prefill_choice="cache-aware")
async def test_what_engines_would_have_is_told(site: Site) -> None:
    place = await reserved(site, "one", 100, sequence_hashes=list(range(1, 7)))
    prefiller = place["worker_id"], place["dp_rank"]
    rank = await on_rank(site, "two", 50)
    question = {"isl_tokens": 40, "sequence_hashes": [1, 2, 9]}
    rows = (await call(site, "/potential_loads", question)).json
    assert len(rows) == len(await get(site, "/workers"))
    found = {(one["worker_id"], one["dp_rank"]): one for one in rows}
    # Two blocks of 16 tokens are there; of 100 tokens that are held 100 stay.
    assert found[prefiller]["potential_prefill_tokens"] == 100 + 40 - 32
    assert found[prefiller]["potential_decode_blocks"] == 0
    row = found[rank["worker_id"], rank["dp_rank"]]
    assert (row["potential_decode_blocks"], row["active_requests"]) == (6, 1)
    others = [one for one in rows if one["role"] == "decode" and one is not row]
    assert {one["potential_decode_blocks"] for one in others} == {3}
    for name in ("one", "two"):
        await call(site, f"/reservations/{name}", method="DELETE")
    assert len(service_of(site)._selector) == 0


@asked(prefill_choice="cache-aware")
async def test_what_prefix_caches_should_have_is_told(site: Site) -> None:
    place = await reserved(site, "one", 100, sequence_hashes=list(range(1, 7)))
    told: Any = {}
    mores: tuple[dict[str, object], ...] = ({}, {"isl_tokens": 1000}, {"token_ids": [5]})
    for more in mores:
        told = (await call(site, "/overlap_scores", {"sequence_hashes": [1, 2, 9]} | more)).json
        assert (told["block_size"], told["num_blocks"]) == (BLOCK_TOKENS, 3)
        assert not told["shared_cache"]["enabled"]
        for row in told["workers"]:
            blocks = 2 * (row["worker_id"] == place["worker_id"])
            assert (row["device_blocks"], row["router_credit_blocks"]) == (blocks, blocks)
            assert row["disk_blocks"] == row["host_pinned_extension_blocks"] == 0
    assert len(told["workers"]) == 2
    # No more than the prompt has, of which the last token is always computed.
    short = {"sequence_hashes": [1, 2, 3], "isl_tokens": 32}
    told = (await call(site, "/overlap_scores", short)).json
    assert max(one["device_blocks"] for one in told["workers"]) == 1
    assert "sequence_hashes" in error(await call(site, "/overlap_scores", {"isl_tokens": 5}), 400)
    many = {"sequence_hashes": [1] * 8193}
    assert "$.sequence_hashes" in error(await call(site, "/overlap_scores", many), 400)
    await call(site, "/reservations/one", method="DELETE")


@asked()
async def test_the_table_of_the_module_has_every_route(site: Site) -> None:
    service, words = service_of(site), select_service.__doc__
    assert words is not None
    found = set()
    for method, paths in re.findall(r"(?m)^ {4}([A-Z]+) +(/.*?) {2,}", words):
        found |= {(path, method) for path in paths.split(", ")}
    served = {
        (path.decode(), method.decode())
        for path, methods in service._routes.items()
        for method in methods
    }
    for verb, methods in service._of_reservation.items():
        path = f"/reservations/ID/{verb.decode()}".rstrip("/")
        served |= {(path, method.decode()) for method in methods}
    assert found == served


@asked(prefill_choice="least-conn")
async def test_what_nobody_follows_is_refused(site: Site) -> None:
    body = {"sequence_hashes": [1]}
    assert "--prefill-choice" in error(await call(site, "/overlap_scores", body), 501)
    assert "index" in error(await call(site, "/dump", method="GET"), 501)
    rows = (await call(site, "/potential_loads", {"isl_tokens": 40} | body)).json
    assert {one["potential_prefill_tokens"] for one in rows if one["role"] == "prefill"} == {40}


@asked()
async def test_large_bodies_are_refused(site: Site) -> None:
    body = {"token_ids": [100_000] * (MAX_BODY_BYTES // 8)}
    assert len(json.dumps(body)) > MAX_BODY_BYTES
    answer = await call(site, "/select_and_reserve", body)
    assert answer.status == 413
    most = {"token_ids": [7] * (MAX_BODY_BYTES // 4)}
    assert (await call(site, "/select", most)).json["effective_prefill_tokens"] == len(
        most["token_ids"]
    )


@asked()
async def test_unknown_names_are_told(site: Site) -> None:
    body = {"selection_id": "one", "isl_tokens": 5}
    unknown = {**body, "worker_id": 17}
    assert "worker 17" in error(await call(site, "/reservations", unknown), 404)
    allowed = {**body, "allowed_worker_ids": [17]}
    assert "worker 17" in error(await call(site, "/select_and_reserve", allowed), 404)
    known = (await get(site, "/workers"))[0]["worker_id"]
    rank = {**body, "worker_id": known, "dp_rank": 900}
    assert "no rank 900" in error(await call(site, "/reservations", rank), 404)
    for path, method in (
        ("/reservations/none/prefill_complete", "POST"),
        ("/reservations/none/output_block", "POST"),
        ("/reservations/none", "DELETE"),
        ("/reservations/", "DELETE"),
        ("/reservations/%00%ff", "DELETE"),
    ):
        assert "no reservation" in error(await call(site, path, method=method), 404)
    assert "route" in error(await call(site, "/dumps", method="GET"), 404)
    assert "route" in error(await call(site, "/reservations/one/more"), 404)
    assert "method" in error(await call(site, "/select", method="GET"), 405)
    assert "method" in error(await call(site, "/reservations/one", method="GET"), 405)


@asked()
async def test_an_id_is_reserved_once_at_a_time(site: Site) -> None:
    await reserved(site, "one")
    body = {"selection_id": "one", "isl_tokens": 5}
    assert "in use" in error(await call(site, "/select_and_reserve", body), 409)
    assert "no rank has" in error(await call(site, "/reservations/one/output_block"), 409)
    assert (await call(site, "/reservations/one", method="DELETE")).status == 200
    assert "no reservation" in error(await call(site, "/reservations/one", method="DELETE"), 404)
    await reserved(site, "one")
    await call(site, "/reservations/one", method="DELETE")


@asked()
async def test_progress_has_bounds(site: Site) -> None:
    rank = await on_rank(site, "one")
    for body, place in (
        ({"decay_fraction": 1.5}, "$.decay_fraction"),
        ({"decay_fraction": -0.1}, "$.decay_fraction"),
        ({"output_tokens": -1}, "$.output_tokens"),
        ({"output_tokens": 10**12}, "$.output_tokens"),
        (b"{", "body"),
    ):
        assert place in error(await call(site, "/reservations/one/output_block", body), 400)
    why = {"failed": "the engine closed the connection"}
    await call(site, "/reservations/one", why, method="DELETE")
    (record,) = await site.ended()
    assert record.outcome is Outcome.UPSTREAM_ERROR
    assert "closed the connection" in record.reason
    row = loads(await get(site, "/loads"))[rank["worker_id"], rank["dp_rank"]]
    assert row["kv_tokens"] == 0


@asked(prefill_timeout_s=5, first_token_timeout_s=5)
async def test_what_nobody_ends_expires(site: Site) -> None:
    for name in ("prefilling", "decoding"):
        await reserved(site, name)
    await call(site, "/reservations/decoding/prefill_complete")
    await asyncio.sleep(7.0)
    assert len(service_of(site)._selector) == 0
    assert "took longer" in error(
        await call(site, "/reservations/prefilling/prefill_complete"), 503
    )
    assert "no reservation" in error(
        await call(site, "/reservations/decoding", method="DELETE"), 404
    )


@asked(lease_s=300)
async def test_who_hangs_up_or_ends_while_waiting_leaves_nothing(site: Site) -> None:
    instances = site.world.proxy.deployment.instances
    names = [f"held{i}" for i in range(BATCH * len(instances.ranks))]
    for name in names:
        await on_rank(site, name)
        await call(site, f"/reservations/{name}/output_block", {"output_tokens": 1})
    for name in ("gone", "ended"):
        await reserved(site, name)
    gone, ended = (send(site, f"/reservations/{one}/prefill_complete") for one in ("gone", "ended"))
    await asyncio.sleep(0.1)
    gone.call.abort()
    assert (await call(site, "/reservations/ended", method="DELETE")).status == 200
    assert "meanwhile" in error(await ended.end(), 409)
    await asyncio.sleep(0.1)
    assert len(service_of(site)._selector) == len(names)
    for name in names:
        await call(site, f"/reservations/{name}", method="DELETE")


@asked(queue_limit=1)
async def test_a_flood_is_refused_with_the_time_to_come_again(site: Site) -> None:
    body = {"isl_tokens": 100}
    calls = [send(site, "/select_and_reserve", body) for _ in range(200)]
    await asyncio.sleep(1.0)
    refused = [one for one in calls if one.status == 429]
    assert refused
    assert all(one.header(b"retry-after") for one in refused)
    assert len(service_of(site)._selector) + len(refused) <= len(calls)
    for one in calls:
        if one.status == 200:
            await call(site, f"/reservations/{one.json['selection_id']}", method="DELETE")
        elif not one.over:
            one.call.abort()
    await asyncio.sleep(1.0)


@asked()
async def test_what_select_keeps_is_bounded(site: Site) -> None:
    service = service_of(site)
    many = {"token_ids": [7] * 9_000, "sequence_hashes": list(range(560)), "phase": "decode"}
    for number in range(_MOST_ASKED + 3):
        await call(site, "/select", many | {"selection_id": str(number)})
    assert len(service._asked) == _MOST_ASKED
    kept = service._asked[str(_MOST_ASKED)]
    assert (kept.token_ids, kept.isl_tokens, len(kept.sequence_hashes)) == (None, 9_000, 512)
    assert "no selection '2'" in error(
        await call(site, "/reservations", {"selection_id": "2"}), 404
    )
    assert (await call(site, "/reservations", {"selection_id": "3"})).status == 201
    await call(site, "/reservations/3", method="DELETE")


@asked()
async def test_a_fault_of_its_own_is_answered(site: Site) -> None:
    await reserved(site, "one")
    selection = service_of(site)._selector.find("one")
    assert selection is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "rank", lambda: asyncio.sleep(0.0, "no rank"))
        answer = await call(site, "/reservations/one/prefill_complete")
    assert "internal error" in error(answer, 500)
    await call(site, "/reservations/one", method="DELETE")


def test_each_model_has_its_own_workers(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        rows = await get(site, "/workers")
        assert {one["model_name"] for one in rows} == {"small", "large"}
        small = await get(site, "/workers?model_name=small")
        assert {one["model_name"] for one in small} == {"small"}
        ids = {one["worker_id"] for one in small}
        for place in range(3):
            chosen = await reserved(site, str(place), model_name="small")
            assert (chosen["model_name"], chosen["worker_id"] in ids) == ("small", True)
        foreign = next(one["worker_id"] for one in rows if one["model_name"] == "large")
        body = {"selection_id": "4", "isl_tokens": 5, "model_name": "small", "worker_id": foreign}
        assert f"no worker {foreign}" in error(await call(site, "/reservations", body), 404)
        for name in ("default", "other"):
            strange = {"isl_tokens": 5, "model_name": name}
            assert "no model" in error(await call(site, "/select_and_reserve", strange), 404)
        assert "no model" in error(await call(site, "/loads?model_name=other", method="GET"), 404)
        found = await get(site, "/loads?model_name=small")
        assert [one["model_name"] for one in found] == ["small"]
        assert sum(one["active_requests"] for one in found[0]["loads"]) == 3
        assert found[0]["pending_count"] == 0
        for place in range(3):
            await call(site, f"/reservations/{place}", method="DELETE")

    flags = on(tmp_path)
    play_groups(scenario, flags={name: flags[name] for name in ("select_key_file", "select_port")})


@pytest.mark.parametrize("seed", range(6))
def test_whatever_callers_do_nothing_is_left(seed: int, tmp_path: Path) -> None:
    """Verbs in any order, at once, of few names, by callers who hang up; engines come and go."""
    draw = random.Random(seed)
    verbs = (
        *(("POST", "/select_and_reserve"), ("POST", "/select"), ("POST", "/reservations")) * 2,
        *(("POST", "/reservations/{}/prefill_complete"),) * 5,
        *(("POST", "/reservations/{}/output_block"), ("DELETE", "/reservations/{}")) * 2,
    )

    async def scenario(site: Site) -> None:
        rows = await get(site, "/workers")
        roster = site.world.proxy.deployment.roster
        rank = site.world.proxy.deployment.instances.ranks[0].target
        open_calls: list[Exchanged] = []
        for step in range(400):
            method, path = draw.choice(verbs)
            name = str(draw.randrange(9))
            body: dict[str, object] = {"selection_id": name, "isl_tokens": draw.randint(1, 3_000)}
            if path == "/reservations" and draw.random() < 0.7:
                body["worker_id"] = draw.choice(rows)["worker_id"]
            body["phase"] = draw.choice(("prefill", "decode"))
            if "{}" in path:
                told: tuple[dict[str, object], ...] = ({}, {"output_tokens": 70}, {"failed": "x"})
                body = draw.choice(told)
            open_calls.append(send(site, path.format(name), body, method=method))
            if draw.random() < 0.15:
                one = open_calls.pop(draw.randrange(len(open_calls)))
                if not one.over:
                    one.call.abort()
            if draw.random() < 0.5:
                await asyncio.sleep(draw.random())
            if step == 150:
                roster.drain(rank.role, rank.url)
            if step == 250:
                roster.remove(rank.role, rank.url, force=True)
        for number in range(9):
            await call(site, f"/reservations/{number}", method="DELETE")
        await asyncio.sleep(1.0)
        statuses = {one.status for one in open_calls}
        assert statuses <= {200, 201, 404, 409, 503}, statuses
        assert {200, 201, 404, 409} <= statuses
        assert len(service_of(site)._selector) == 0

    play(scenario, flags=on(tmp_path) | {"scrape_interval_s": 1000.0})


# Whether it is there.


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        assert site.world.proxy.select_service is None

    name = "balanceroute.proxy.live.select_service"
    monkeypatch.delitem(sys.modules, name, raising=False)
    play(scenario)
    assert name not in sys.modules


def test_connectors_that_decode_first_have_none(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        raise AssertionError(site)

    with pytest.raises(ConfigError, match="calls for the prefill"):
        play(scenario, connector="mooncake-layerwise", flags=on(tmp_path))


@pytest.mark.parametrize(
    "taken", [{"port": 8123}, {"admin": True, "admin_port": 8123}], ids=["clients", "admin"]
)
def test_its_port_is_its_own(tmp_path: Path, taken: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--select-port is 8123, which serves others already"):
        of_flags(**(on(tmp_path) | taken | {"select_port": 8123}))


@asked()
async def test_keys_change_while_it_serves(site: Site) -> None:
    service = service_of(site)
    service.keys = service.keys[:1]
    assert "key" in error(await call(site, "/workers", method="GET"), 401)
    changed: Headers = [(b"authorization", b"bearer another-key")]
    assert (await call(site, "/workers", method="GET", headers=changed)).status == 200


def test_the_example_of_a_router_moves_the_bytes(tmp_path: Path) -> None:
    """Eight requests at once for four slots: each answer is whole, and nothing is left behind."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [f"--select-key-file={on(tmp_path)['select_key_file']}", f"--select-port={port}"]
    # Leases pass a hundred times as fast too: as long as a test may take.
    engines = (
        "--prefillers 2 --ranks 2 --batch 2 --time-scale 100 --max-model-len 4096 --lease-s 100000"
    )
    with emulated(engines.split()) as urls, proxy_before(urls, flags, tmp_path) as proxy:
        asked = {"prompt": "a b c d", "max_tokens": 40, "temperature": 0}
        whole = httpx.post(f"{urls['decode'][0]}/v1/completions", json=asked, trust_env=False)
        command = [sys.executable, str(ROOT / "scripts" / "select_client.py")]
        command += [f"--service=http://127.0.0.1:{port}", "--requests=8", "--max-tokens=40"]
        command += ["--loads"]
        command += [f"--key-file={tmp_path / 'select-keys'}", "a b c d"]
        done = subprocess.run(command, capture_output=True, timeout=100.0, check=False)
        assert done.returncode == 0, done.stderr
        log = proxy.log
    rows = [json.loads(line) for line in done.stderr.splitlines()]
    assert [one["role"] for one in rows] == ["prefill", "prefill", "decode", "decode"]
    assert rows[0]["potential_prefill_tokens"] == 1
    answers = [literal_eval(line) for line in done.stdout.decode().splitlines()]
    assert len(answers) == 8
    # What an engine says that does it all; with a KV cache of another prompt it is another text.
    text = whole.json()["choices"][0]["text"]
    assert all(one and (text.startswith(one) or one.startswith(text)) for one in answers)
    ended = [json.loads(line) for line in log.read_text().splitlines() if "outcome" in line]
    assert len(ended) == 8
    assert {one["outcome"] for one in ended} == {"ok"}
