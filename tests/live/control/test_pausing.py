"""Pause, resume and abort all of the admin listener, before engines that obey and others."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.test_proxy_connectors import BODY, CHAT, COMPLETIONS, TALK
from tests.live.test_token_requests import ASKED, GENERATE, SAMPLING
from tests.support.site import Exchanged, Site, served

from balanceroute.proxy.live.control.pausing import ABORTED
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.wire.sse import event_data, whole_events

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

LONG: dict[str, Any] = TALK | {"temperature": 0, "stream": True, "max_tokens": 400}
WHOLE: dict[str, Any] = TALK | {"temperature": 0, "max_tokens": 400}
PATHS = (b"/pause", b"/resume", b"/abort_requests")
ENGINES = 4


class Engines:
    """Notes the orders that engines get.

    `silent` ones never answer, and with a `status` all answer that, and nothing else happens.
    """

    def __init__(self, site: Site, silent: tuple[str, ...] = (), status: int = 0) -> None:
        self.silent, self.status = silent, status
        self.heard: list[tuple[str, str]] = []
        self._site = site
        for path in PATHS:
            site.handlers[path] = self._take

    def _take(self, engine: str, request: "HttpRequest", reply: "Reply") -> None:
        query = f"?{request.query.decode()}" if request.query else ""
        self.heard.append((engine, request.path.decode() + query))
        assert request.body == b"{}"
        if engine in self.silent:
            return
        if self.status:
            reply.send(self.status, [(b"content-type", b"application/json")], b"{}")
            return
        handler = self._site.handlers.pop(request.path)
        routes = self._site.fleet.engine(engine)._answer
        routes(request, reply)
        self._site.handlers[request.path] = handler


async def order(site: Site, path: str, values: object = b"") -> Exchanged:
    return await site.admin(path, values or {})


async def running(site: Site, count: int = 4, **more: Any) -> list[Exchanged]:
    streams = [site.send(CHAT, LONG | more) for _ in range(count)]
    for stream in streams:
        await stream.until_events(9)
    return streams


def reason(answer: Exchanged) -> str | None:
    messages = answer.chunks if answer.events else [answer.json]
    (said,) = [c["finish_reason"] for m in messages for c in m["choices"] if c["finish_reason"]]
    return str(said)


@served()
async def test_abort_all_ends_each_answer_once_with_what_it_had(site: Site) -> None:
    engines = Engines(site)
    streams = await running(site)
    whole = [site.send(COMPLETIONS, WHOLE | {"prompt": "t1 t2"}) for _ in range(2)]
    await site.until(lambda: len(site.received("decode", COMPLETIONS)) == 2)
    answer = await order(site, "/abort_requests")
    assert (answer.status, answer.json["aborted"]) == (200, 6)
    assert [one["status"] for one in answer.json["engines"]] == [200] * ENGINES
    assert {path for _, path in engines.heard} == {"/abort_requests"}
    for stream in streams:
        assert (await stream.end()).done
        assert reason(stream) == "abort"
        assert len(stream.text.split()) > 5
    for one in whole:
        assert (await one.end()).status == 200
        assert reason(one) == "abort"
    assert {record.outcome for record in await site.ended(6)} == {Outcome.OK}
    assert not (await site.admin("/is_paused")).json["is_paused"]
    assert (await site.post(CHAT, TALK)).status == 200


@pytest.mark.parametrize("status", [200, 404, None])
@served()
async def test_what_engines_do_not_end_ends_with_an_error(site: Site, status: int | None) -> None:
    """Silent: the order is not answered. 404: vLLM without its development mode."""
    ranks = ("decode/0", "decode/1")
    engines = Engines(site, () if status else ranks, 404 if status == 404 else 0)
    streams = await running(site)
    answer = await order(site, "/pause")
    if status == 200:
        assert answer.status == 200
    else:
        assert answer.status == 502
        told = {one["status"] for one in answer.json["engines"] if one["role"] == "decode"}
        assert told == {status}
    assert answer.json["status"] == "paused"
    path = "/pause?mode=abort&clear_cache=true"
    assert sorted(engines.heard) == sorted((e, path) for e in (*ranks, "prefill/0", "prefill/1"))
    for stream in streams:
        await stream.end()
        assert stream.done is (status == 200)
        if status != 200:
            assert ABORTED.encode() in stream.events[-1]
    assert len(await site.ended(4)) == 4
    assert not any(site.fleet.engine(rank).exchanges for rank in ranks)


@served()
async def test_while_it_is_paused_who_comes_waits(site: Site) -> None:
    Engines(site)
    assert (await order(site, "/pause?mode=abort")).status == 200
    assert (await site.admin("/is_paused")).json["is_paused"]
    site.seen.clear()
    waiting = [site.send(CHAT, TALK) for _ in range(3)]
    await asyncio.sleep(30.0)
    assert not any(one.over for one in waiting)
    assert not site.received("prefill", CHAT)
    assert (await order(site, "/resume")).json["status"] == "resumed"
    for one in waiting:
        assert (await one.end()).status == 200
    assert not (await site.admin("/is_paused")).json["is_paused"]


@served(flags={"direct": "prefill"})
async def test_what_one_prefiller_does_as_a_whole_waits_too(site: Site) -> None:
    Engines(site)
    await order(site, "/pause")
    site.seen.clear()
    several = [site.send(CHAT, TALK | {"n": 2}) for _ in range(2)]
    await asyncio.sleep(5.0)
    assert not site.received("prefill", CHAT)
    # None of them keeps an order to wait from its end.
    assert (await order(site, "/pause?mode=wait&timeout_s=1")).status == 200
    await order(site, "/resume")
    for one in several:
        assert (await one.end()).status == 200


@served()
async def test_who_waits_is_aborted_too(site: Site) -> None:
    Engines(site)
    await order(site, "/pause")
    waiting = [site.send(CHAT, body) for body in (TALK, LONG)]
    await site.until(lambda: len(site.world.plane.deployment.driver.sessions) == 2)
    answer = await order(site, "/abort_requests")
    assert (answer.status, answer.json["aborted"]) == (200, 2)
    for one in waiting:
        await one.end()
        assert (one.status, one.header(b"retry-after")) == (503, b"1")
        assert ABORTED in one.json["error"]["message"]
    await order(site, "/resume")


@served(batch_limit=2, flags={"batch": 2})
async def test_to_wait_lets_end_what_runs_and_what_is_parked(site: Site) -> None:
    engines = Engines(site)
    driver = site.world.plane.deployment.driver
    streams = [site.send(CHAT, LONG) for _ in range(8)]
    await site.until(lambda: len(driver.scheduler.pool) > 0)
    late = await order(site, "/pause?mode=wait&timeout_s=0.1&engines=false")
    assert late.status == 409
    assert "run still" in late.json["error"]["message"]
    behind = site.send(CHAT, TALK)
    answer = await order(site, "/pause?mode=wait&clear_cache=false")
    assert (answer.status, answer.json["aborted"]) == (200, 0)
    for stream in streams:
        assert stream.done
        assert reason(stream) == "length"
    assert {path for _, path in engines.heard} == {"/pause?mode=wait&clear_cache=false"}
    assert not behind.over
    assert (await order(site, "/resume?engines=false")).json["engines"] == []
    assert (await behind.end()).status == 200


@served()
async def test_some_requests_are_aborted_by_their_ids(site: Site) -> None:
    streams = [site.send(CHAT, LONG, headers=[(b"x-request-id", b"r%d" % i)]) for i in range(3)]
    for stream in streams:
        await stream.until_events(5)
    answer = await order(site, "/abort_requests", {"request_ids": ["r1", "other"]})
    assert (answer.status, answer.json["aborted"]) == (200, 1)
    for i, stream in enumerate(streams):
        await stream.end()
        assert stream.done is (i != 1)
    assert ABORTED.encode() in streams[1].events[-1]


@served(connector="mooncake-layerwise")
async def test_local_prefills_wait_too_and_begin_again(site: Site) -> None:
    Engines(site)
    await order(site, "/pause")
    waiting = [site.send(CHAT, TALK) for _ in range(2)]
    await asyncio.sleep(5.0)
    assert not site.seen or not site.received("decode", CHAT)
    await order(site, "/resume")
    for one in waiting:
        assert (await one.end()).status == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause?mode=keep", {}, "mode=keep is not served: streams that stand still"),
        ("/sleep?mode=keep", {}, "mode=keep is not served"),
        ("/pause?mode=stop", {}, "mode is 'stop', must be one of abort, wait"),
        ("/sleep?level=3", {}, "level is 3, must be 0, 1 or 2"),
        ("/sleep?level=-1", {}, "level must be 0, 1 or 2"),
        ("/sleep?tags=weights", {}, "the page takes level, mode, timeout_s"),
        ("/wake_up?level=1", {}, "the page takes tags"),
        ("/pause?mode=wait&mode=abort", {}, "each once"),
        ("/pause?level=1", {}, "the page takes mode"),
        ("/pause?engines=maybe", {}, "engines must be true or false"),
        ("/pause?mode=wait&timeout_s=-1", {}, "timeout_s must be from 0"),
        ("/pause?mode=wait&timeout_s=nan", {}, "timeout_s must be from 0"),
        ("/resume?mode=wait", {}, "the page takes engines"),
        ("/abort_requests", {"request_ids": "r1"}, "request_ids must be a list"),
        ("/abort_requests", {"ids": []}, "unknown key"),
    ],
)
@served()
async def test_what_cannot_be_ordered_is_refused(
    site: Site, path: str, body: Any, words: str
) -> None:
    answer = await order(site, path, body)
    assert answer.status == 400
    assert words in answer.json["error"]["message"]
    assert not (await site.admin("/is_paused")).json["is_paused"]


DRAWN = {"temperature": 0.7, "seed": 3}
TOLD: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, LONG | {"frequency_penalty": 0.5}),
    "several": (COMPLETIONS, {"prompt": "t1 t2", "ignore_eos": True} | DRAWN | {"n": 3}),
    "ids": (CHAT, LONG | {"return_token_ids": True, "logprobs": True}),
    "generate": (
        GENERATE,
        ASKED | {"sampling_params": SAMPLING | DRAWN | {"n": 2, "max_tokens": 400}},
    ),
}


@pytest.mark.parametrize("kind", TOLD)
@served(flags={"resume": "exact"}, ranks=2)
async def test_an_answer_that_is_begun_again_ends_with_what_its_client_has(
    site: Site, kind: str
) -> None:
    """The engine that says it again was told to end before it had come to anything new."""
    path, values = TOLD[kind]
    site.fleet.faults.set("decode/0", reset_after_tokens=40)
    values_ = {"temperature": 0, "max_tokens": 400, "stream": True} | values
    stream = site.send(path, values_)
    await site.until(lambda: len(site.received("decode")) == 2)
    await asyncio.sleep(0.4)
    before = stream.body
    assert (await order(site, "/abort_requests")).status == 200
    await stream.end()
    assert stream.done, stream.body
    assert stream.body.startswith(before)
    behind = [c for one in whole_events(stream.body[len(before) :]) for c in choices_in(one)]
    count = values.get("n") or values.get("sampling_params", {}).get("n", 1)
    assert sorted(one["index"] for one in behind) == list(range(count))
    for one in behind:
        assert one["finish_reason"] == "abort"
        assert not any(one.get(name) for name in ("text", "delta", "token_ids"))
    (record,) = await site.ended()
    assert (record.outcome, record.resumes) == (Outcome.OK, 1)


def choices_in(event: bytes) -> list[Any]:
    data = event_data(event)
    return [] if data == b"[DONE]" else json.loads(data)["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@served(flags={"first_token": "prefill", "batch": 4}, ranks=2, batch_limit=1)
async def test_a_first_token_that_came_early_is_the_answer_if_its_rank_was_told_to_end(
    site: Site, path: str
) -> None:
    greedy = BODY | {"temperature": 0}
    asked = {CHAT: TALK | {"temperature": 0}, COMPLETIONS: greedy, GENERATE: ASKED}[path]
    # Both ranks' places are taken, by others of their own.
    for rank in ("decode/0", "decode/1"):
        site.send(CHAT, LONG, port=site.fleet.engine(rank).port)
    await site.until(lambda: len(site.received("decode")) == 2)
    stream = site.send(path, asked | {"stream": True})
    await stream.until_events(1)
    await asyncio.sleep(0.5)
    assert (await order(site, "/abort_requests")).status == 200
    await stream.end()
    assert stream.done, stream.body
    assert reason(stream) == "abort", stream.body
    (record,) = await site.ended()
    assert (record.outcome, record.first_token_differences) == (Outcome.OK, 0)
    assert len(site.received("decode", path)) == (3 if path == CHAT else 1)
